"""Keras' optimizers for servers: its formulas, in torch, element by element.

torch's own differ: Keras' momentum holds the learning rate, so a schedule acts on it otherwise; its
Adam adds epsilon before the correction of bias; its weight decay is always apart from the gradient.
A test holds each to Keras itself, step by step.
"""

from typing import Any

import torch
from torch import Tensor


class _Keras(torch.optim.Optimizer):
    """One gradient step for each parameter, by `_update`."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if group["weight_decay"]:
                        parameter.sub_(parameter * group["weight_decay"] * group["lr"])
                    self._update(parameter, parameter.grad, group, self.state[parameter])

    def _update(
        self, weights: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class KerasSGD(_Keras):
    """`keras.optimizers.SGD`."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**settings, "weight_decay": weight_decay})

    def _update(
        self, weights: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        rate, momentum = group["lr"], group["momentum"]
        if not momentum:
            weights.add_(gradient, alpha=-rate)
            return
        velocity = _kept(state, "velocity", weights)
        velocity.mul_(momentum).add_(gradient, alpha=-rate)
        if group["nesterov"]:
            weights.add_(velocity, alpha=momentum).add_(gradient, alpha=-rate)
        else:
            weights.add_(velocity)


class KerasAdam(_Keras):
    """`keras.optimizers.Adam` and `AdamW`."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-7,
        amsgrad: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "amsgrad": amsgrad}
        super().__init__(params, {**settings, "weight_decay": weight_decay})

    def _update(
        self, weights: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        (beta1, beta2), step = group["betas"], _counted(state)
        rate = group["lr"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        mean, square = _kept(state, "mean", weights), _kept(state, "square", weights)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["amsgrad"]:
            largest = _kept(state, "largest", weights)
            torch.maximum(largest, square, out=largest)
            square = largest
        weights.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-rate)


class KerasRMSprop(_Keras):
    """`keras.optimizers.RMSprop`."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        eps: float = 1e-7,
        centered: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "rho": rho, "momentum": momentum, "eps": eps, "centered": centered}
        super().__init__(params, {**settings, "weight_decay": weight_decay})

    def _update(
        self, weights: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        rho, square = group["rho"], _kept(state, "square", weights)
        square.mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
        scale = square + group["eps"]
        if group["centered"]:
            mean = _kept(state, "mean", weights)
            mean.mul_(rho).add_(gradient, alpha=1 - rho)
            scale.addcmul_(mean, mean, value=-1)
        step = scale.rsqrt_().mul_(gradient).mul_(group["lr"])
        if group["momentum"]:
            step = _kept(state, "momentum", weights).mul_(group["momentum"]).add_(step)
        weights.sub_(step)


class KerasAdagrad(_Keras):
    """`keras.optimizers.Adagrad`."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        initial: float = 0.1,
        eps: float = 1e-7,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "initial": initial, "eps": eps}
        super().__init__(params, {**settings, "weight_decay": weight_decay})

    def _update(
        self, weights: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        total = _kept(state, "total", weights, group["initial"])
        total.addcmul_(gradient, gradient)
        weights.addcdiv_(gradient, (total + group["eps"]).sqrt_(), value=-group["lr"])


KERAS_RULES: tuple[type[_Keras], ...] = (KerasSGD, KerasAdam, KerasRMSprop, KerasAdagrad)


def _kept(state: dict[str, Any], name: str, weights: Tensor, first: float = 0.0) -> Tensor:
    if name not in state:
        state[name] = torch.full_like(weights, first)
    kept: Tensor = state[name]
    return kept


def _counted(state: dict[str, Any]) -> float:
    """How many steps there have been, with this one."""
    state["step"] = step = state.get("step", torch.tensor(0.0)) + 1
    return float(step)
