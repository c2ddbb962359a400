"""Whether the workers' weights are still alike: a stretch of them is compared as they train.

Equal weights and equal gradients stay equal but for rounding. What differs by more was changed by
one worker alone, and every step after it would be wrong on somebody's weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.collectives.context import Context
from paceline.errors import ExchangeError

STRETCH = 4096
"""So many elements are compared at a time: some microseconds."""

TOLERANCE = 1e-5
"""Of the stretch's mean magnitude. Hosts of different kinds round differently, which averages out
over a stretch; a step at any rate that trains is more."""

OFTEN_STEPS = 16

OTHER_WEIGHTS = (
    "the workers' weights have become different: one of them changed its weights or gradients "
    "alone. Do the same on every worker (what torch.autograd.grad gives is its own: take "
    "paceline.mean of it), or before paceline.distribute, which gives all worker 0's."
)


def is_looked_at(step: int) -> bool:
    """Each of the first steps, and one of as many later."""
    return step <= OFTEN_STEPS or step % OFTEN_STEPS == 0


@torch.no_grad()
def stretch_of(tensors: Sequence[Tensor], turn: int) -> Tensor | None:
    """Another stretch of the weights in each turn; None where a look at it would cost."""
    tensor = tensors[turn % len(tensors)].detach()
    if tensor.device.type != "cpu" or not tensor.is_floating_point() or not tensor.numel():
        return None
    if not tensor.is_contiguous():
        return tensor
    first = turn // len(tensors) * STRETCH % tensor.numel()
    return tensor.view(-1)[first : first + STRETCH]


def are_other(mean: float, own: float, magnitude: float, dtype: torch.dtype) -> bool:
    """Whether the mean of all workers' samples cannot be of weights like this worker's."""
    return abs(mean - own) > tolerance(dtype) * magnitude


@torch.no_grad()
def refuse_other(tensors: Sequence[Tensor], context: Context) -> None:
    """All weights at once, where a script is done with them: what it did by itself was in no
    exchange. Every worker calls it."""
    compared = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    identity = context.identity  # where others go on, a mean is still over all who began
    if identity.workers == 1 or identity.goes_on or not compared:
        return
    means = torch.stack([tensor.mean(dtype=torch.float64).cpu() for tensor in compared])
    sizes = [float(tensor.abs().mean()) for tensor in compared]
    everyones = context.training.mean(means)
    for tensor, mean, own, size in zip(compared, everyones, means, sizes, strict=True):
        if are_other(float(mean), float(own), size, tensor.dtype):
            raise ExchangeError(OTHER_WEIGHTS)


def tolerance(dtype: torch.dtype) -> float:
    """Of a mean magnitude: what equal weights may differ by."""
    return max(TOLERANCE, 4 * torch.finfo(dtype).eps)
