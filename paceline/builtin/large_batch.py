"""LARS and LAMB: optimizers whose steps are scaled layer by layer, for batches of many thousands.

With a large batch the rate that suits one layer destroys another. Both scale a layer's step by the
norm of its weights over the norm of its gradient (LARS: You, Gitman, Ginsburg 2017) or of its Adam
step (LAMB: You et al. 2020). Biases and the scales of norms, which have one dimension, are stepped
without it and without decay, as in the papers' own code.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lars(Optimizer):
    """Momentum SGD with a rate of its own for each layer: `trust` x |weights| / |gradient|."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the built-in loop passes none"
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            scaled = [p for p in weights if p.ndim > 1]
            steps = {id(p): p.grad for p in weights}
            if scaled:
                gradients = [p.grad for p in scaled]
                decay = group["weight_decay"]
                norms, sizes = torch._foreach_norm(scaled), torch._foreach_norm(gradients)
                ratios = [
                    _ratio(group["trust"] * norm, size + decay * norm)
                    for norm, size in zip(norms, sizes, strict=True)
                ]
                decayed = torch._foreach_add(gradients, scaled, alpha=decay)
                torch._foreach_mul_(decayed, ratios)
                steps.update(zip(map(id, scaled), decayed, strict=True))
            for parameter in weights:
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
            moving = [self.state[p]["momentum_buffer"] for p in weights]
            if weights:
                torch._foreach_mul_(moving, group["momentum"])
                torch._foreach_add_(moving, [steps[id(p)] for p in weights], alpha=group["lr"])
                torch._foreach_sub_(weights, moving)


class Lamb(Optimizer):
    """Adam's step, decay added, scaled in each layer by |weights| / |step|."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the built-in loop passes none"
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            group["count"] = group.get("count", 0) + 1
            steps = self._adam_steps(weights, group)
            scaled = [index for index, p in enumerate(weights) if p.ndim > 1]
            for index in scaled:
                steps[index].add_(weights[index], alpha=group["weight_decay"])
            if scaled:
                norms = torch._foreach_norm([weights[index] for index in scaled])
                sizes = torch._foreach_norm([steps[index] for index in scaled])
                ratios = [_ratio(norm, size) for norm, size in zip(norms, sizes, strict=True)]
                torch._foreach_mul_([steps[index] for index in scaled], ratios)
            torch._foreach_add_(weights, steps, alpha=-group["lr"])

    def _adam_steps(self, weights: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        (fast, slow), count = group["betas"], group["count"]
        for parameter in weights:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        means = [self.state[p]["exp_avg"] for p in weights]
        squares = [self.state[p]["exp_avg_sq"] for p in weights]
        gradients = [p.grad for p in weights if p.grad is not None]
        torch._foreach_lerp_(means, gradients, 1 - fast)
        torch._foreach_mul_(squares, slow)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - slow)
        roots = torch._foreach_sqrt(torch._foreach_div(squares, 1 - slow**count))
        torch._foreach_add_(roots, group["eps"])
        return list(torch._foreach_div(torch._foreach_div(means, 1 - fast**count), list(roots)))


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """`above / below`, and 1 where either is 0: a fresh layer of zeros still learns."""
    known = (above > 0) & (below > 0)
    return torch.where(known, above / below, torch.ones_like(above))
