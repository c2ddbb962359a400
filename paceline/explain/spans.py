"""Slowness with a beginning or an end: from one step on, up to one, between two, or several times.

A straggler, a busy machine or a slow disk that is there for half of a run shows as a cause half as
large when steps are averaged. Here the steps are found in which it was there, so that it is named
with them; `inside` then explains those steps by themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TypeVar

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

MOST_SPANS = 4
"""What comes more often is told as what comes and goes."""

MORE_FACTOR = 1.15
"""Several spans are told where they cost this many times what the worst alone does."""

MOST_BINS = 120
"""Longer runs are looked at in as many pieces, and more closely at the two edges only."""

GROWN_FACTOR = 1.5
"""Steps of the last fifth that take this many times those of the first."""

PIECES, RISING_PIECES = 10, 8
"""Steps grow where of so many pieces of a run so many take longer than the one before."""

LARGEST_RISE = 0.4
"""Share of the whole growth that one piece may bring; more is a jump."""


Places = tuple[int, int]
"""The first of some steps that lie together and the first after them, counted from 0."""

T = TypeVar("T")


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


def slowed(facts: Facts) -> tuple[Slowed, ...]:
    """The parts of the run that were slow, each with the worker and the phase that were; the worst
    first. Empty where none was."""
    found = {worker.name: _spans(worker) for worker in facts.workers}
    first = worst([_grown(w) or _worst_of(w, found[w.name]) for w in facts.workers])
    if first is None:
        return ()
    spans = found[first.worker]
    if first.grows or len(spans) == 1:
        return (first,)
    entries = next(worker for worker in facts.workers if worker.name == first.worker).entries
    bounds = [(entries[a].step, entries[b - 1].step) for a, b in spans]
    each = [worst([_slowed_in(worker, own, bounds) for worker in facts.workers]) for own in bounds]
    return tuple(sorted((one for one in each if one is not None), key=lambda one: -one.seconds))


def _spans(worker: WorkerFacts) -> list[Places]:
    """Where the steps that were slow lie; the longest first. Empty where none were."""
    times = [step.seconds for step in worker.entries]
    if len(times) < 2 * SLOWED_STEPS or min(times) <= 0:
        return []
    one, several = [_interval(times)], _intervals(times)
    of_one, of_several = _cost(times, one), _cost(times, several)
    return several if of_several > MORE_FACTOR * of_one else one if of_one else []


def _cost(times: Sequence[float], spans: Sequence[Places]) -> float:
    """What these steps take longer than the others, in all; 0 where they are not surely slow."""
    inside, others = _divided(times, spans)
    if min(len(inside), len(others)) < SLOWED_STEPS:
        return 0.0
    slow, usual = median(inside), median(others)
    middle = math.sqrt(slow * usual)
    clear = fmean(t < middle for t in others), fmean(t > middle for t in inside)
    if slow < SLOWED_FACTOR * usual or min(clear) < CLEAR_FRACTION:
        return 0.0
    cost = len(inside) * (slow - usual)
    return cost if cost >= LEAST_SECONDS else 0.0


def _divided(steps: Sequence[T], spans: Sequence[Places]) -> tuple[list[T], list[T]]:
    """Steps of the spans, and all others."""
    is_slow = [any(a <= place < b for a, b in spans) for place in range(len(steps))]
    return (
        [step for step, slow in zip(steps, is_slow, strict=True) if slow],
        [step for step, slow in zip(steps, is_slow, strict=True) if not slow],
    )


def _worst_of(worker: WorkerFacts, spans: Sequence[Places]) -> Slowed | None:
    each = [_slowed(worker, start, end, spans) for start, end in spans]
    return max(each, key=lambda one: one.seconds, default=None)


def _slowed(worker: WorkerFacts, start: int, end: int, spans: Sequence[Places]) -> Slowed:
    """One of the spans, against the steps outside all of them."""
    steps, usual = worker.entries, _divided(worker.entries, spans)[1]
    more = excess(steps[start:end], usual)
    phase = max(more, key=lambda name: more[name])
    slow = median(step.seconds for step in steps[start:end])
    return Slowed(
        worker=worker.name,
        phase=phase,
        seconds=more[phase] * (end - start) / len(steps),
        start=steps[start].step if start else None,
        end=steps[end].step if end < len(steps) else None,
        factor=slow / median(step.seconds for step in usual),
    )


def _slowed_in(
    worker: WorkerFacts, own: tuple[int, int], bounds: Sequence[tuple[int, int]]
) -> Slowed | None:
    """A span that was found in the steps of another worker, by the first and last of them."""

    def places(first: int, last: int) -> Places:
        held = [n for n, step in enumerate(worker.entries) if first <= step.step <= last]
        return (held[0], held[-1] + 1) if held else (0, 0)

    start, end = places(*own)
    spans = [places(*bound) for bound in bounds]
    if end - start < SLOWED_STEPS or not _divided(worker.entries, spans)[1]:
        return None
    return _slowed(worker, start, end, spans)


def _intervals(times: Sequence[float]) -> list[Places]:
    """Every run of slow steps, where they are told apart by one bound; the longest first."""
    logs = [math.log(seconds) for seconds in times]
    bound, half = _bound(sorted(logs)), SLOWED_STEPS // 2
    is_slow = [median(logs[max(0, n - half) : n + half + 1]) > bound for n in range(len(logs))]
    edges = [n for n in range(1, len(logs)) if is_slow[n] != is_slow[n - 1]]
    pieces = list(pairwise([0, *edges, len(logs)]))
    slow = [(a, b) for a, b in pieces if is_slow[a]]
    if not 2 <= len(slow) <= MOST_SPANS or min(b - a for a, b in pieces) < SLOWED_STEPS:
        return []
    return sorted(slow, key=lambda span: span[0] - span[1])


def _bound(ordered: Sequence[float]) -> float:
    """What divides numbers into two kinds with the largest variance between them."""
    total, below, found, best = sum(ordered), 0.0, ordered[-1], 0.0
    for count, value in enumerate(ordered[:-1], start=1):
        below += value
        rest = len(ordered) - count
        apart = count * rest * ((total - below) / rest - below / count) ** 2
        if apart > best:
            found, best = (value + ordered[count]) / 2, apart
    return found


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
