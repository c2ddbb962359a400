"""What a tensor's `grad` is while the gradient itself is with the servers.

Where the servers hold a step back until `optimizer.step()`, its norm can be asked for and it can be
scaled, which is all that clipping by global norm does, so that `torch.nn.utils.clip_grad_norm_`
works as it stands. It can be cleared. Anything else is an error with the way out: a wrong number
would be worse.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ExchangeError

CLEARING = (Tensor.zero_, torch._foreach_zero_)


class HeldGradient(Tensor):
    """Has a tensor's shape and no data."""

    of: Tensor
    norm_of: Callable[[], float]
    scale_by: Callable[[float], None]
    way_out: str

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        norm_of: Callable[[], float],
        scale_by: Callable[[float], None],
        way_out: str,
    ) -> "HeldGradient":
        made: HeldGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.of, made.norm_of, made.scale_by, made.way_out = like, norm_of, scale_by, way_out
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.linalg.vector_norm and args[1:] in ((), (2,), (2.0,)):
            return torch.tensor(args[0].norm_of())
        if func is Tensor.mul_ and isinstance(args[0], HeldGradient):
            args[0].scale_by(float(args[1]))
            return args[0]
        if func in CLEARING:
            for held in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                held.of.grad = torch.zeros_like(held.of)  # unlike None, it takes part in a step
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        held = next(arg for arg in args if isinstance(arg, HeldGradient))
        raise ExchangeError(
            f"{func} needs a gradient that has gone to the servers: the first step showed that it "
            f"may leave as it is made, and this one uses it, or adds to it without zero_grad(). "
            f"{held.way_out}"
        )
