"""Whether a run learns: losses that are no numbers, that rise, that stay at guessing; staleness.

The price of asynchrony is paid here: stale gradients at a rate that synchronous training bears may
keep a model at chance, however many samples a second it is shown.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from paceline import record, spec
from paceline.explain.facts import Facts
from paceline.explain.findings import CauseName, Learning
from paceline.record.entries import NOT_FINITE

RISEN_FACTOR = 1.3
"""A loss this many times the first one has diverged."""

SPIKE_FACTOR = 3.0
"""So has one that was this many times the first one on the way."""

SETTLED_FRACTION = 0.2
"""The first steps of a run may overshoot."""

LEARNT_FRACTION = 0.05
"""A loss that fell by less than this has not learnt; noise of a batch is about as large."""

CHANCE_FRACTION = 0.03
"""How near to ln(classes) a loss is chance's."""

THROWN_FACTOR = 2.0
"""A loss this many times guessing's is not where any training starts."""

JUDGED_STEPS = 40
"""Fewer steps are too short to have learnt anything."""

WINDOW = 10
"""Losses that are averaged at the start and at the end, at most; a tenth of the run when less."""

STALE = 0.5
"""Mean staleness from which it is worth a word."""


def learning(facts: Facts, baseline: Facts | None = None) -> Learning | None:
    """What became of the loss; None where none is known."""
    known = list(facts.losses.values())
    if not known:
        return None
    few = max(1, min(WINDOW, len(known) // 10))
    equal = _compared(facts, baseline) if baseline is not None and baseline.losses else (None, None)
    return Learning(
        first=_mean(known[: max(1, few // 3)]),
        last=_mean(known[-few:]),
        not_finite_from=record.not_finite_from(facts.losses),
        chance=_chance(facts),
        staleness=_staleness(facts),
        at_equal_samples=equal[0],
        at_equal_seconds=equal[1],
    )


def wrong_number(facts: Facts) -> str:
    """What workers saw that is not a number, where the script told no loss; empty for nothing."""
    seen = [event.text for event in facts.events if event.kind == NOT_FINITE]
    return seen[0].partition(";")[0] if seen and not facts.losses else ""


def trouble(facts: Facts, found: Learning | None) -> CauseName | None:
    """What is wrong with the loss, by name."""
    if wrong_number(facts):
        return "not-finite"
    if found is None:
        return None
    if found.not_finite_from is not None:
        return "not-finite"
    finite = list(facts.losses.values())
    stale = found.staleness is not None and found.staleness >= STALE
    risen = found.last > RISEN_FACTOR * found.first and found.last > found.first + 0.1
    if risen or _has_spike(facts, found):
        return "staleness" if stale and not _rate_is_absurd(finite) else "diverged"
    if at_chance(facts, found):
        return "staleness" if stale else "chance"
    worse = found.at_equal_samples
    if stale and worse is not None and worse[0] > (1 + 4 * LEARNT_FRACTION) * worse[1]:
        return "staleness"
    return None


def at_chance(facts: Facts, found: Learning) -> bool:
    """Whether the run had the time to learn, and guesses."""
    if found.chance is None or len(facts.losses) < JUDGED_STEPS:
        return False
    near = abs(found.last - found.chance) <= CHANCE_FRACTION * found.chance
    if found.last > (1 - LEARNT_FRACTION) * found.first:
        return near
    # Where the first steps threw it far off it has fallen, and guesses if it stands still there.
    known = list(facts.losses.values())
    middle = _mean(known[len(known) // 2 :][:WINDOW])
    still = abs(middle - found.chance) <= CHANCE_FRACTION * found.chance
    return near and still and found.first > THROWN_FACTOR * found.chance


def _has_spike(facts: Facts, found: Learning) -> bool:
    """A loss far above the first one on the way, unless it was early and is long forgotten."""
    step, loss = worst(facts)
    early = step < min(facts.losses) + SETTLED_FRACTION * len(facts.losses)
    forgotten = early and found.last < (1 - LEARNT_FRACTION) * found.first
    return loss > max(SPIKE_FACTOR * found.first, found.first + 1) and not forgotten


def worst(facts: Facts) -> tuple[int, float]:
    """The step with the largest finite loss, and that loss."""
    finite = {step: loss for step, loss in facts.losses.items() if math.isfinite(loss)}
    step = max(finite, key=lambda number: finite[number])
    return step, finite[step]


def _rate_is_absurd(losses: Sequence[float]) -> bool:
    """Stale gradients stop a model from learning; they do not take its loss to the stars."""
    return max(losses) > 1e3 * max(losses[0], 1e-9)


def _chance(facts: Facts) -> float | None:
    for member in facts.members:
        classes = member.results.get("num_classes")
        if classes is not None and classes >= 2:
            return math.log(classes)
    return None


def _staleness(facts: Facts) -> float | None:
    kind = facts.architecture
    stale = isinstance(kind, spec.Server) and kind.mode in ("async", "bounded", "quorum")
    found = facts.summary.staleness
    return found.get("mean") if stale and isinstance(found, dict) else None


def _compared(
    facts: Facts, baseline: Facts
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Both runs' losses at as many samples, and after as many seconds of training."""
    own, other = _curve(facts), _curve(baseline)
    found = []
    for axis in (0, 1):
        end = min(own[-1][axis], other[-1][axis])
        pair = (_at(own, axis, end), _at(other, axis, end))
        found.append(pair if all(math.isfinite(loss) for loss in pair) else None)
    return found[0], found[1]


def _curve(facts: Facts) -> list[tuple[float, float, float]]:
    """Samples seen, seconds of training, loss."""
    batch = sum(worker.samples for worker in facts.workers)
    step = facts.typical.step_seconds + facts.typical.paused_seconds
    return [((n + 1) * batch, (n + 1) * step, loss) for n, loss in facts.losses.items()]


def _at(curve: Sequence[tuple[float, float, float]], axis: int, place: float) -> float:
    """Mean loss of the last few steps before a place on an axis."""
    before = [point[2] for point in curve if point[axis] <= place * 1.000001]
    few = max(1, min(WINDOW, len(before) // 10))
    return _mean(before[-few:])


def _mean(losses: Sequence[float]) -> float:
    return fmean(losses) if losses else math.nan
