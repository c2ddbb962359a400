"""Torch's optimizers, and two of ours for large batches, by the names of `spec.Optimizer`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline import spec
from paceline.builtin.large_batch import Lamb, Lars

TABLE: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "lars": Lars,
    "lamb": Lamb,
}
FUSED = ("sgd", "adam", "adamw", "adagrad")


def build(options: spec.Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, in torch's fused form where it has one: one pass over the weights."""
    keywords: dict[str, Any] = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    if options.momentum:
        keywords["momentum"] = options.momentum
    if options.nesterov:
        keywords["nesterov"] = True
    if options.name == "lars":
        keywords["trust"] = options.trust
    parameters = list(parameters)
    on_gpu = any(parameter.is_cuda for parameter in parameters)
    if options.name in FUSED and not (on_gpu and options.name == "adagrad"):  # torch has none there
        keywords["fused"] = True
    return TABLE[options.name](parameters, **keywords)


def state_factor(options: spec.Optimizer) -> int:
    """How many numbers an optimizer keeps for each weight."""
    kept = {"sgd": 0, "adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1, "lars": 1, "lamb": 2}
    return kept[options.name] + (1 if options.momentum and options.name != "lars" else 0)
