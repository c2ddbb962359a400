"""Means of several workers' gradients, made where they lie, block by block.

A block stays in the core's own cache until every worker's part is in. NumPy adds, not torch: its
kernels use the widest vectors of the core, and a call costs a fraction of one into torch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.architectures.server.memory import Piece, gather

BLOCK_ELEMENTS = 64 * 1024
"""256 KiB of float32: of the sizes tried, the fastest on cores with 1 MiB of second-level cache."""

Part = tuple[list[Piece], float]
"""One worker's gradient of a chunk and its weight."""

Array = np.ndarray[Any, Any]


def mean(parts: Sequence[Part], into: Tensor) -> Tensor:
    """Write the weighted mean of the parts into `into`; their weights sum to one or less.

    Less, when a worker without a gradient counts as zero.
    """
    values = [_whole(pieces, into) for pieces, _ in parts]
    weights = [weight for _, weight in parts]
    if into.dtype in (torch.float16, torch.bfloat16):
        exact = torch.empty(into.shape, dtype=torch.float32)
        _sum([value.float().numpy() for value in values], weights, exact.numpy())
        return into.copy_(exact)
    _sum([value.numpy() for value in values], weights, into.numpy())
    return into


def only(parts: Sequence[Part], elements: int) -> Tensor | None:
    """The gradient that is its own mean: one worker's, whole, with all the weight."""
    match parts:
        case [([(0, stop, values)], 1.0)] if stop == elements:
            return values
    return None


def _sum(values: Sequence[Array], weights: Sequence[float], into: Array) -> None:
    """Sum of the values times their weights; equal ones are multiplied in once, at the end."""
    alike = all(weight == weights[0] for weight in weights)
    scaled = into[:0] if alike else np.empty(min(BLOCK_ELEMENTS, into.size), into.dtype)
    for start in range(0, into.size, BLOCK_ELEMENTS):
        block, first, *others = (array[start : start + BLOCK_ELEMENTS] for array in (into, *values))
        if alike:
            for value in others:
                first = np.add(first, value, out=block)
            np.multiply(first, weights[0], out=block)
        else:
            np.multiply(first, weights[0], out=block)
            for value, weight in zip(others, weights[1:], strict=True):
                block += np.multiply(value, weight, out=scaled[: block.size])


def _whole(pieces: list[Piece], like: Tensor) -> Tensor:
    """The one piece that covers all, if there is one; else all of them in a tensor `like` it."""
    if len(pieces) == 1 and pieces[0][:2] == (0, like.numel()):
        return pieces[0][2]
    return gather(pieces, torch.empty_like(like))
