"""Where to cut a row of units into stages: pure arithmetic over profiled times and sizes.

The slowest stage sets the pace of a pipeline, so the cuts make the slowest as fast as can be, among
those that fit into a worker's memory. `pipeline` measures the units and runs the stages.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate

import msgspec

from paceline.errors import SpecError
from paceline.protocol.pipeline import Pipe
from paceline.units import format_bytes


class UnitCost(msgspec.Struct, frozen=True, kw_only=True):
    """One unit on one micro-batch."""

    seconds: float
    """Forward and backward."""

    parameter_bytes: int
    activation_bytes: int
    """What its forward pass keeps for its backward pass."""


def in_flight(pipe: Pipe, stage: int) -> int:
    """Micro-batches whose activations a stage holds at once, at most: by its owner's own turns."""
    turns = [turn for turn in pipe.turns(pipe.owner(stage)) if turn.stage == stage]
    return max(accumulate(1 if turn.kind == "forward" else -1 for turn in turns))


def cut(
    costs: Sequence[UnitCost],
    *,
    pieces: int,
    held: Sequence[int],
    weight_factor: float,
    memory_bytes: int | None,
) -> list[int]:
    """The first unit of each piece.

    `held` says how many micro-batches' activations each piece holds, `weight_factor` how many times
    its weights a piece takes with gradients and optimizer. A piece has at least one unit.
    """
    assert pieces <= len(costs), "see `too_few`"
    seconds, weights, kept = (
        _sums(getattr(cost, name) for cost in costs)
        for name in ("seconds", "parameter_bytes", "activation_bytes")
    )

    def size(piece: int, start: int, stop: int) -> float:
        return weight_factor * (weights[stop] - weights[start]) + held[piece] * (
            kept[stop] - kept[start]
        )

    @cache
    def best(piece: int, start: int) -> tuple[float, tuple[int, ...]]:
        """The least time of the slowest of the pieces from `piece` on, and where they start."""
        if piece == pieces - 1:
            stops = [len(costs)]
        else:
            stops = list(range(start + 1, len(costs) - (pieces - piece - 1) + 1))
        found: tuple[float, tuple[int, ...]] = (math.inf, ())
        for stop in stops:
            if memory_bytes is not None and size(piece, start, stop) > memory_bytes:
                break
            rest = best(piece + 1, stop) if piece < pieces - 1 else (0.0, ())
            slowest = max(seconds[stop] - seconds[start], rest[0])
            if slowest < found[0]:
                found = (slowest, (start, *rest[1]))
        return found

    slowest, starts = best(0, 0)
    if math.isinf(slowest):
        assert memory_bytes is not None
        largest = max(
            weight_factor * cost.parameter_bytes + held[-1] * cost.activation_bytes
            for cost in costs
        )
        total = weight_factor * weights[-1] + max(held) * kept[-1]
        needs = f"all take about {format_bytes(round(total))}, one {format_bytes(round(largest))}"
        problem = f"no {pieces} stages fit {format_bytes(memory_bytes)} each: {needs}."
        fix = "add workers, take a smaller batch or more microbatches, or give more memory."
        raise SpecError("architecture pipeline", problem, fix)
    return list(starts)


def too_few(units: int, workers: int, loops: int, replicas: int) -> SpecError:
    """A row of so few units does not make `loops` stages on each of a pipeline's workers."""
    problem = f"{units} units that can be cut cannot make {workers * loops} stages"
    problem += f", {loops} on each of {workers} workers." if loops > 1 else "."
    if units < 2:
        fix = "choose ring, which leaves the model whole."
    elif units < workers:
        fix = f"use at most {units * replicas} workers."
    elif units < 2 * workers:
        fix = "write schedule=1f1b."
    else:
        fix = f"write loops={units // workers}."
    return SpecError("architecture pipeline", problem, fix)


def _sums(values: Iterable[float]) -> list[float]:
    """Where each unit starts on a line of all of them, and where the last ends."""
    return list(accumulate(values, initial=0.0))
