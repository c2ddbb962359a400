"""Means of several workers' gradients, made where they lie, block by block.

A running mean needs one pass per worker after the first, where scaling and adding needs two; a
block stays in the core's own cache until every worker's part is in.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.architectures.server.memory import Piece, gather

BLOCK_ELEMENTS = 64 * 1024
"""256 KiB of float32: of the sizes tried, the fastest on cores with 1 MiB of second-level cache."""

Part = tuple[list[Piece], float]
"""One worker's gradient of a chunk and its weight."""


def mean(parts: Sequence[Part], into: Tensor) -> Tensor:
    """Write the weighted mean of the parts into `into`; their weights sum to one or less.

    Less, when a worker without a gradient counts as zero.
    """
    whole = [_whole(pieces, into.numel()) for pieces, _ in parts]
    values = [
        gather(pieces, torch.empty_like(into)) if one is None else one
        for (pieces, _), one in zip(parts, whole, strict=True)
    ]
    weights = [weight for _, weight in parts]
    if into.dtype in (torch.float16, torch.bfloat16):
        exact = _running_mean([v.float() for v in values], weights, into.float())
        return into.copy_(exact)
    return _running_mean(values, weights, into)


def _running_mean(values: Sequence[Tensor], weights: Sequence[float], into: Tensor) -> Tensor:
    total = sum(weights)
    # Two parts need one pass, so there is nothing to keep in the cache between passes.
    length = BLOCK_ELEMENTS if len(values) > 2 else into.numel()
    for start in range(0, into.numel(), length):
        stop = start + length
        block = into[start:stop]
        seen, first = weights[0], values[0][start:stop]
        for weight, more in zip(weights[1:], values[1:], strict=True):
            seen += weight
            torch.lerp(first, more[start:stop], weight / seen, out=block)
            first = block
        if total < 1 - 1e-9:
            torch.mul(first, total, out=block)
        elif first is not block:
            block.copy_(first)
    return into


def _whole(pieces: list[Piece], elements: int) -> Tensor | None:
    """The one piece that covers all, if there is one."""
    if len(pieces) == 1 and pieces[0][:2] == (0, elements):
        return pieces[0][2]
    return None
