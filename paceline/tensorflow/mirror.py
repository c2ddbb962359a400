"""Keras variables as torch sees them, so that one exchange serves both frameworks.

A `Mirror` is a torch module with one parameter for each trained variable; architectures, records
and everything behind them know nothing else. Numbers pass between the two as NumPy views of the
same memory, or as one copy where somebody would write to them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
"""TensorFlow takes an array as it is when it begins at a multiple of this, and copies others."""

Array = NDArray[Any]


class Mirror(torch.nn.Module):
    """The trained variables of a Keras model as parameters, the other numbers as buffers."""

    def __init__(self, trained: Sequence[Any], rest: Sequence[Any]) -> None:
        """`rest`: variables of the model that are not trained, whose first values are shared."""
        super().__init__()
        self.trained, self.rest = list(trained), list(rest)
        for number, variable in enumerate(self.trained):
            values = torch.nn.Parameter(_copied(variable))
            self.register_parameter(_name(number, variable), values)
        for number, variable in enumerate(self.rest):
            self.register_buffer(f"rest_{_name(number, variable)}", _copied(variable))
        self.tensors: list[Tensor] = list(self.parameters())

    @torch.no_grad()
    def read(self, *, rest: bool = True) -> None:
        """Take Keras' values."""
        for tensor, variable in self._pairs(rest):
            tensor.copy_(to_torch(np.asarray(variable)))

    def write(self, *, rest: bool = True) -> None:
        """Give Keras these values."""
        for tensor, variable in self._pairs(rest):
            variable.assign(to_numpy(tensor.detach().clone()))

    def _pairs(self, rest: bool) -> list[tuple[Tensor, Any]]:
        pairs = list(zip(self.tensors, self.trained, strict=False))
        return [*pairs, *zip(self.buffers(), self.rest, strict=True)] if rest else pairs


class StandIn(torch.optim.Optimizer):
    """In the place of a Keras optimizer that updates by itself: its steps are counted, no more."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors, {"lr": 0.0})

    def step(self, closure: Any = None) -> Any:
        return None


def to_torch(array: Array) -> Tensor:
    """A tensor on the array's own memory."""
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":  # a type that NumPy knows by name only
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> Array:
    """An array on the tensor's own memory."""
    if tensor.dtype is torch.bfloat16:
        from ml_dtypes import bfloat16  # comes with TensorFlow

        return tensor.view(torch.uint16).numpy().view(bfloat16)
    array: Array = tensor.numpy()
    return array


def handed_over(tensor: Tensor) -> Array:
    """Values for TensorFlow that stay as they are, whatever becomes of the tensor.

    TensorFlow copies by itself what is not aligned; the rest it would look at where it lies.
    """
    plain = tensor.detach()
    is_kept = plain.data_ptr() % ALIGNMENT == 0 or not plain.is_contiguous()
    return to_numpy(plain.clone() if is_kept else plain)


def _copied(variable: Any) -> Tensor:
    """In memory of its own: who has the array could read it there."""
    return to_torch(np.asarray(variable)).clone()


def _name(number: int, variable: Any) -> str:
    """Without the layer's own name, in which Keras counts all layers that a process ever made."""
    return f"{number}_{variable.name}".replace(".", "_")
