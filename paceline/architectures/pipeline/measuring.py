"""What worker 0 finds out about a row of units before it is cut into stages.

It calls the units one after the other as the stages will: what each takes and returns, whether all
of them compute what the model's own forward does, and which see more than one sample at a time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from paceline.compute.deferred import Deferred
from paceline.compute.units import WHERE, Unit, UnitChain
from paceline.errors import SpecError
from paceline.protocol.partition import UnitCost

PROFILE_REPEATS = 3

CLOSE, CLOSE_ROUNDED = 1e-3, 3e-2
"""Of the largest output: how far units and model may be apart, in float32 and rounded to 16 bits.
They take the same steps, so a layer that is missing is far more than that."""

Loss = Callable[[Tensor, Tensor], Tensor]


class PipelineJob(NamedTuple):
    """What is trained, as the loop knows it."""

    build: Callable[[], nn.Module]
    sample: Tensor
    """A micro-batch of inputs without memory: shape and type."""

    loss: Loss
    precision: Callable[[], AbstractContextManager[object]]
    channels_last: bool
    weight_factor: float
    """How many times its weights a worker holds: with gradients and the optimizer's state."""


class MeasuredUnits(msgspec.Struct, frozen=True, kw_only=True):
    """One unit, or several where what is between them cannot travel."""

    start: int
    """Which unit is the first of them."""

    cost: UnitCost
    shape: tuple[int, ...]
    """What it returns for a micro-batch."""

    sees_batch: bool
    """Whether a sample's output depends on more than the sample: the others, chance, the past."""


def measure(
    deferred: Deferred,
    units: Sequence[Unit],
    job: PipelineJob,
    device: torch.device,
    whole: nn.Module | None,
) -> list[MeasuredUnits]:
    """Call the units on a random micro-batch, with weights that are there only meanwhile.

    `whole` is the model with all its weights, where there is memory for it: SpecError where the
    units compute something else.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        given, expected = _random_sample(job.sample, device), None
        torch.manual_seed(0)
        if whole is not None:
            with torch.no_grad(), job.precision():
                expected = whole(given)
        torch.manual_seed(0)  # dropout draws the same numbers again
        measured: list[MeasuredUnits] = []
        first, features = 0, given
        for index, unit in enumerate(units):
            state = _random_state(device)
            row = deferred.copy(UnitChain(units[first : index + 1]), device).train()
            with _refusing(unit.name):
                kept = [buffer.clone() for buffer in row.buffers()]
                with torch.no_grad(), job.precision():
                    output = row(features)
                after = _random_state(device)
                if not _travels(output, unit.name, is_last=index + 1 == len(units)):
                    _set_random_state(state, device)  # it goes on as one with the next
                    continue
                changed = any(
                    not torch.equal(a, b) for a, b in zip(kept, row.buffers(), strict=True)
                )
                drawn = any(not torch.equal(a, b) for a, b in zip(state, after, strict=True))
                mixes = not drawn and _mixes_samples(row, features, output, job)
                cost = _cost(row, units[first : index + 1], features, job, is_first=first == 0)
            measured.append(
                MeasuredUnits(
                    start=first,
                    cost=cost,
                    shape=tuple(output.shape),
                    sees_batch=changed or drawn or mixes,
                )
            )
            _set_random_state(after, device)
            first, features = index + 1, output
    if expected is not None and not _is_close(features, expected):
        problem = "its units, called one after the other, compute something else than the model."
        fix = "let units() return every module in the order of forward, or use ring."
        raise SpecError(WHERE, problem, fix)
    return measured


def _cost(
    row: UnitChain, units: Sequence[Unit], features: Tensor, job: PipelineJob, *, is_first: bool
) -> UnitCost:
    """Time a unit by itself, and count what its forward pass keeps."""
    weights = {p.untyped_storage().data_ptr() for p in row.parameters()}
    taken, kept = [], 0
    for _ in range(PROFILE_REPEATS):
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor, into: dict[int, int] = sizes) -> Tensor:
            into[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        given = features.clone().requires_grad_(not is_first)
        began = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), job.precision():
            output = row(given)
        if output.requires_grad:  # not where layers at the beginning are frozen
            output.sum().backward()
        if given.is_cuda:
            torch.cuda.synchronize(given.device)
        taken.append(time.perf_counter() - began)
        kept = sum(size for place, size in sizes.items() if place not in weights)
        if given.requires_grad and given.grad is None:
            who = ", ".join(unit.words for unit in units)
            problem = f"{who} hands no gradient back, so what is before it never learns."
            raise SpecError(WHERE, problem, "use single, or leave these layers out.")
    size = sum(unit.parameter_bytes for unit in units)
    return UnitCost(seconds=min(taken), parameter_bytes=size, activation_bytes=kept)


def _random_sample(sample: Tensor, device: torch.device) -> Tensor:
    if sample.dtype.is_floating_point:
        return torch.randn(sample.shape, dtype=sample.dtype, device=device)
    return torch.zeros(sample.shape, dtype=sample.dtype, device=device)


def _travels(output: Any, name: str, *, is_last: bool) -> bool:
    """Whether one worker can hand this to another: one tensor that gradients flow through."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return True
    if is_last:
        problem = f"the last unit, {name}, returns a {type(output).__name__} that has no loss."
        raise SpecError(WHERE, problem, "return one tensor of floats, a row for each sample.")
    return False


@torch.no_grad()
def _mixes_samples(row: UnitChain, features: Tensor, output: Tensor, job: PipelineJob) -> bool:
    """Whether half of the samples give something else when the others are not there."""
    half = len(features) // 2
    if not half or not output.ndim or len(output) != len(features):
        return False
    try:
        with job.precision():
            alone = row(features[:half])
    except Exception:  # as a batch norm that is given a single sample
        return True
    return alone.shape != output[:half].shape or not _is_close(alone, output[:half])


def _is_close(found: Any, expected: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return False
    if found.shape != expected.shape:
        return False
    part = CLOSE if expected.dtype in (torch.float32, torch.float64) else CLOSE_ROUNDED
    found, expected = found.double(), expected.double()
    scale = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=part, atol=part * scale, equal_nan=True)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """A unit that cannot be called by itself is a matter of the model."""
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        if "memory" in text:  # too little of it is no matter of the model's form
            raise
        problem = f"called by itself, unit {name} fails: {type(error).__name__}: {text}"
        fix = (
            "let each module take what the one before returns, as nn.Sequential does; or use ring."
        )
        raise SpecError(WHERE, problem, fix) from error


def _random_state(device: torch.device) -> list[Tensor]:
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]


def _set_random_state(state: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    for own in state[1:]:
        torch.cuda.set_rng_state(own, device)
