"""Slowness with a beginning or an end: from one step on, up to one, or between two.

A straggler, a busy machine or a slow disk that is there for half of a run shows as a cause half as
large when steps are averaged. Here the steps are found in which it was there, so that it is named
with them; `inside` then explains those steps by themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from paceline.explain.facts import Facts, WorkerFacts
from paceline.explain.phases import excess, worst

SLOWED_FACTOR = 1.3
"""Steps that take this many times the others are slow."""

SLOWED_STEPS = 5
"""As many, at least, are slow, and as many are not."""

LEAST_SECONDS = 0.2
"""What they take longer in all; a run of a few milliseconds has no parts."""

CLEAR_FRACTION = 0.85
"""Share of the steps that must lie on their side of the middle between slow and usual."""

MOST_BINS = 120
"""Longer runs are looked at in as many pieces, and more closely at the two edges only."""

GROWN_FACTOR = 1.5
"""Steps of the last fifth that take this many times those of the first."""

PIECES, RISING_PIECES = 10, 8
"""Steps grow where of so many pieces of a run so many take longer than the one before."""

LARGEST_RISE = 0.4
"""Share of the whole growth that one piece may bring; more is a jump."""


@dataclass(frozen=True, kw_only=True)
class Slowed:
    """What has made steps slow for a part of the run."""

    worker: str
    everybody: bool = False
    """Every worker became slow in this phase."""

    phase: str
    seconds: float
    """What it costs per step, on average over the run."""

    start: int | None
    """The first slow step; None where they were slow from the beginning."""

    end: int | None
    """The first one after them; None where they are slow to the end."""

    factor: float
    """Time of a slow step over the others'."""

    grows: bool = False
    """Each step is a little longer than the one before; `factor` is the last ones' over the
    first ones'."""

    def holds(self, step: int) -> bool:
        return (self.start is None or self.start <= step) and (self.end is None or step < self.end)


def slowed(facts: Facts) -> Slowed | None:
    """The worker and the phase that were slow for a part of the run; None where none was."""
    return worst([_grown(worker) or _slowed(worker) for worker in facts.workers])


def _slowed(worker: WorkerFacts) -> Slowed | None:
    steps = worker.entries
    times = [step.seconds for step in steps]
    if len(times) < 2 * SLOWED_STEPS or min(times) <= 0:
        return None
    start, end = _interval(times)
    inside, others = times[start:end], times[:start] + times[end:]
    slow, usual = median(inside), median(others)
    middle = math.sqrt(slow * usual)
    clear = fmean(t < middle for t in others), fmean(t > middle for t in inside)
    if slow < SLOWED_FACTOR * usual or min(clear) < CLEAR_FRACTION:
        return None
    if len(inside) * (slow - usual) < LEAST_SECONDS:
        return None
    more = excess(steps[start:end], [*steps[:start], *steps[end:]])
    phase = max(more, key=lambda name: more[name])
    return Slowed(
        worker=worker.name,
        phase=phase,
        seconds=more[phase] * len(inside) / len(times),
        start=steps[start].step if start else None,
        end=steps[end].step if end < len(times) else None,
        factor=slow / usual,
    )


def _interval(times: Sequence[float]) -> tuple[int, int]:
    """The run of steps that stands out most by being slow, and leaves enough others."""
    logs = [math.log(seconds) for seconds in times]  # one very long step is not a slow run of them
    width = max(1, math.ceil(len(logs) / MOST_BINS))
    edges = [*range(0, len(logs), width), len(logs)]
    found = _best(logs, edges, edges)
    if width > 1:
        near = [range(max(0, e - width), min(len(logs), e + width) + 1) for e in found]
        found = _best(logs, near[0], near[1])
    return found


def _best(logs: Sequence[float], starts: Sequence[int], ends: Sequence[int]) -> tuple[int, int]:
    """The cut with the largest variance between slow steps and others."""
    sums = [0.0]
    for value in logs:
        sums.append(sums[-1] + value)
    whole, found, best = len(logs), (0, len(logs)), 0.0
    for start in starts:
        for end in ends:
            count = end - start
            rest = whole - count
            if count < SLOWED_STEPS or rest < SLOWED_STEPS:
                continue
            inside = sums[end] - sums[start]
            higher = inside / count - (sums[-1] - inside) / rest
            if higher > 0 and count * rest * higher**2 > best:
                found, best = (start, end), count * rest * higher**2
    return found if best else (0, whole - SLOWED_STEPS)


def _grown(worker: WorkerFacts) -> Slowed | None:
    """Steps that take longer and longer, without a jump."""
    steps = worker.entries
    if len(steps) < PIECES * SLOWED_STEPS // 2:
        return None
    edges = [round(len(steps) * n / PIECES) for n in range(PIECES + 1)]
    pieces = [steps[a:b] for a, b in pairwise(edges)]
    times = [median(step.seconds for step in piece) for piece in pieces]
    rises = [after - before for before, after in pairwise(times)]
    first, last = fmean(times[:2]), fmean(times[-2:])
    rising = sum(rise > 0 for rise in rises)
    if last < GROWN_FACTOR * first or rising < RISING_PIECES:
        return None
    if max(rises) > LARGEST_RISE * (times[-1] - times[0]):
        return None
    more = excess(steps, pieces[0])
    phase = max(more, key=lambda name: more[name])
    return Slowed(
        worker=worker.name,
        phase=phase,
        seconds=more[phase],
        start=None,
        end=None,
        factor=last / first,
        grows=True,
    )
