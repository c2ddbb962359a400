"""Slowness that comes and goes (one step in eight takes four times as long), or comes and stays.

A mean hides both, and their cure is another one than that of a step which is always long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeVar

from paceline.explain.facts import Facts, WorkerFacts
from paceline.record import PHASES, Step
from paceline.record.pauses import outside_seconds

SLOW_FACTOR = 1.5
"""A slow step takes this many times the median."""

RAREST, COMMONEST = 0.02, 0.4
"""Shares of slow steps between which slowness comes and goes."""

SLOWED_FACTOR = 1.3
"""Steps that take this many times those before them have become slow."""

SLOWED_STEPS = 5
"""As many, at least, before and after."""

CLEAR_FRACTION = 0.85
"""Share of the steps that must lie on their side of the middle between before and after."""

FEWEST_STEPS = 8
OWN_PHASES = ("input", "forward", "backward", "update", "outside")
"""What a worker does by itself; the others' waits only mirror it."""


@dataclass(frozen=True, kw_only=True)
class Unsteady:
    """What makes some steps slow."""

    worker: str
    phase: str
    """A phase of a step, or "outside"."""

    seconds: float
    """What it costs per step, on average."""

    everybody: bool = False
    """Every worker has slow steps of this kind."""

    every: int
    """One step in so many."""

    factor: float
    """Time of a slow step over the median's."""


@dataclass(frozen=True, kw_only=True)
class Slowed:
    """What has made all steps slow from one on."""

    worker: str
    everybody: bool
    """Every worker has become slow in this phase."""

    phase: str
    seconds: float
    """What it costs per step, on average over the run."""

    step: int
    factor: float


Found = TypeVar("Found", Slowed, Unsteady)


def slowed(facts: Facts) -> Slowed | None:
    """The worker and the phase that became slow during the run; None where none did."""
    return _worst([_slowed(worker) for worker in facts.workers])


def _worst(each: Sequence[Found | None]) -> Found | None:
    """What costs most of what was found of each worker, in its own work if anything is there."""
    found = [one for one in each if one is not None]
    own = [one for one in found if one.phase in OWN_PHASES]
    worst = max(own or found, key=lambda one: one.seconds, default=None)
    if worst is None:
        return None
    alike = sum(one.phase == worst.phase for one in found)
    return replace(worst, everybody=len(each) > 1 and alike == len(each))


def _slowed(worker: WorkerFacts) -> Slowed | None:
    steps = worker.entries
    times = [step.seconds for step in steps]
    if len(times) < 2 * SLOWED_STEPS:
        return None
    cuts = range(SLOWED_STEPS, len(times) - SLOWED_STEPS + 1)
    cut = max(cuts, key=lambda k: k * (len(times) - k) * (fmean(times[k:]) - fmean(times[:k])) ** 2)
    before, after = median(times[:cut]), median(times[cut:])
    middle = (before + after) / 2
    clear = fmean(t < middle for t in times[:cut]), fmean(t > middle for t in times[cut:])
    if after < SLOWED_FACTOR * before or min(clear) < CLEAR_FRACTION:
        return None
    excess = _excess(steps[cut:], steps[:cut])
    phase = max(excess, key=lambda name: excess[name])
    return Slowed(
        worker=worker.name,
        everybody=False,
        phase=phase,
        seconds=excess[phase] * (len(times) - cut) / len(times),
        step=steps[cut].step,
        factor=after / before,
    )


def unsteady(facts: Facts) -> Unsteady | None:
    """The worker and the phase behind slow steps; None where steps are alike."""
    return _worst([_of_worker(worker) for worker in facts.workers])


def _of_worker(worker: WorkerFacts) -> Unsteady | None:
    steps = worker.entries
    if len(steps) < FEWEST_STEPS:
        return None
    middle = median(step.seconds for step in steps)
    slow = [step for step in steps if step.seconds > SLOW_FACTOR * middle]
    if len(slow) < 2 or not RAREST <= len(slow) / len(steps) <= COMMONEST:
        return None
    usual = [step for step in steps if step.seconds <= SLOW_FACTOR * middle]
    excess = _excess(slow, usual)
    phase = max(excess, key=lambda name: excess[name])
    return Unsteady(
        worker=worker.name,
        phase=phase,
        seconds=excess[phase] * len(slow) / len(steps),
        every=round(len(steps) / len(slow)),
        factor=fmean(step.seconds for step in slow) / middle,
    )


def _excess(slow: Sequence[Step], usual: Sequence[Step]) -> dict[str, float]:
    """By how much each phase takes longer in slow steps."""
    return {
        phase: fmean(_phase(s, phase) for s in slow) - fmean(_phase(s, phase) for s in usual)
        for phase in (*PHASES, "outside")
    }


def _phase(step: Step, phase: str) -> float:
    if phase == "outside":
        return outside_seconds(step)
    return step.breakdown_seconds.get(phase, 0.0)
