"""Which Keras optimizers servers can run, and with what settings.

A rule is a torch optimizer with Keras' formula (`architectures/server/seat/keras_rules`). What
happens around an update in Keras and not in the rule (constraints, averages of weights) is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
import torch

from paceline import spec
from paceline.errors import SpecError
from paceline.served import keras_rules
from paceline.tensorflow.mirror import Mirror

Settings = dict[str, Any]


def _sgd(optimizer: Any) -> Settings:
    return {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}


def _adam(optimizer: Any) -> Settings:
    betas = (float(optimizer.beta_1), float(optimizer.beta_2))
    return {"betas": betas, "eps": optimizer.epsilon, "amsgrad": bool(optimizer.amsgrad)}


def _rmsprop(optimizer: Any) -> Settings:
    settings = {"rho": optimizer.rho, "momentum": optimizer.momentum, "eps": optimizer.epsilon}
    return {**settings, "centered": optimizer.centered}


def _adagrad(optimizer: Any) -> Settings:
    return {"initial": optimizer.initial_accumulator_value, "eps": optimizer.epsilon}


RULES: dict[type, tuple[type[torch.optim.Optimizer], Callable[[Any], Settings]]] = {
    keras.optimizers.SGD: (keras_rules.KerasSGD, _sgd),
    keras.optimizers.Adam: (keras_rules.KerasAdam, _adam),
    keras.optimizers.AdamW: (keras_rules.KerasAdam, _adam),
    keras.optimizers.RMSprop: (keras_rules.KerasRMSprop, _rmsprop),
    keras.optimizers.Adagrad: (keras_rules.KerasAdagrad, _adagrad),
}
"""Exactly these classes: a subclass may compute something else."""


def check(optimizer: Any, variables: Sequence[Any], options: spec.Architecture) -> None:
    """Refuse what servers cannot do in the place of a Keras optimizer."""
    where = f"architecture {spec.format_architecture(options)}"
    fix = "write server:mode=sync without update: then every worker updates by itself."
    name, known = type(optimizer).__name__, ", ".join(kind.__name__ for kind in RULES)
    problem = ""
    if type(optimizer) not in RULES:
        problem = f"the optimizer runs on servers, which know {known}, and not {name}."
    elif optimizer.gradient_accumulation_steps:
        problem = "gradient_accumulation_steps is set, and servers update with every gradient."
    elif optimizer.use_ema:
        problem = "use_ema is set, and weights are the servers'."
    elif optimizer.loss_scale_factor:
        problem = "loss_scale_factor is set, and servers take gradients as they are."
    elif any(variable.constraint is not None for variable in variables):
        problem = "a layer has a constraint on its weights, and weights are the servers'."
    if problem:
        raise SpecError(where, problem, fix)


def make(optimizer: Any, mirror: Mirror) -> torch.optim.Optimizer:
    """The rule with the settings of a Keras optimizer, over the mirror's tensors."""
    kind, settings_of = RULES[type(optimizer)]
    decay = optimizer.weight_decay
    decays = [bool(decay) and bool(optimizer._use_weight_decay(v)) for v in mirror.trained]
    groups = [
        {
            "params": [t for t, d in zip(mirror.tensors, decays, strict=True) if d is decayed],
            "weight_decay": float(decay) if decayed else 0.0,
        }
        for decayed in (False, True)
        if decayed in decays
    ]
    made: Callable[..., torch.optim.Optimizer] = kind
    return made(groups, lr=float(optimizer.learning_rate), **settings_of(optimizer))


def clipped(optimizer: Any, gradients: Sequence[Any]) -> Sequence[Any]:
    """Bound this worker's own gradients as the optimizer would."""
    if optimizer.clipnorm:
        return [tf.clip_by_norm(gradient, optimizer.clipnorm) for gradient in gradients]
    if optimizer.global_clipnorm:
        return list(tf.clip_by_global_norm(list(gradients), optimizer.global_clipnorm)[0])
    if optimizer.clipvalue:
        bound = optimizer.clipvalue
        return [tf.clip_by_value(gradient, -bound, bound) for gradient in gradients]
    return gradients
