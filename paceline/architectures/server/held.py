"""What a parameter's `grad` is while the gradient itself is with the servers.

Its norm can be asked for and it can be scaled, which is all that clipping by global norm does, so
that `torch.nn.utils.clip_grad_norm_` works as it stands. Anything else is an error with the way
out: a wrong number would be worse.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ExchangeError


class HeldGradient(Tensor):
    """Has a parameter's shape and no data."""

    norm_of: Callable[[], float]
    scale_by: Callable[[float], None]

    @staticmethod
    def __new__(
        cls, like: Tensor, norm_of: Callable[[], float], scale_by: Callable[[float], None]
    ) -> "HeldGradient":
        made: HeldGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.norm_of, made.scale_by = norm_of, scale_by
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
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise ExchangeError(
            f"{func} asks for a gradient that is with the servers, where only its norm is known; "
            "write server:update=worker to have averaged gradients in the worker."
        )
