"""Torch's optimizers, and two of ours for large batches, by the names of `spec.Optimizer`."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from paceline import spec


def build(options: spec.Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, in torch's fused form where it has one: one pass over the weights."""
    keywords: dict[str, Any] = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    if options.momentum:
        keywords["momentum"] = options.momentum
    if options.nesterov:
        keywords["nesterov"] = True
    if options.facts.takes_trust:
        keywords["trust"] = options.trust
    parameters = list(parameters)
    on_gpu = any(parameter.is_cuda for parameter in parameters)
    if options.facts.is_fused_on_gpu if on_gpu else options.facts.is_fused:
        keywords["fused"] = True
    return class_of(options.facts)(parameters, **keywords)


def class_of(facts: spec.OptimizerFacts) -> type[torch.optim.Optimizer]:
    """The class that the table of optimizers names."""
    module, _, name = facts.torch_class.partition(":")
    kind: type[torch.optim.Optimizer] = getattr(import_module(module), name)
    return kind
