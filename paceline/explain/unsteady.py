"""Slowness that comes and goes: one step in eight takes four times as long.

A mean hides it, and its cure is another one than that of a step which is always long.
"""

from dataclasses import dataclass
from statistics import fmean, median

from paceline.explain.facts import Facts, WorkerFacts
from paceline.explain.phases import excess, worst

SLOW_FACTOR = 1.5
"""A slow step takes this many times the median."""

RAREST, COMMONEST = 0.02, 0.4
"""Shares of slow steps between which slowness comes and goes."""

FEWEST_STEPS = 8


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


def unsteady(facts: Facts) -> Unsteady | None:
    """The worker and the phase behind slow steps; None where steps are alike."""
    return worst([_of_worker(worker) for worker in facts.workers])


def _of_worker(worker: WorkerFacts) -> Unsteady | None:
    steps = worker.entries
    if len(steps) < FEWEST_STEPS:
        return None
    middle = median(step.seconds for step in steps)
    slow = [step for step in steps if step.seconds > SLOW_FACTOR * middle]
    if len(slow) < 2 or not RAREST <= len(slow) / len(steps) <= COMMONEST:
        return None
    usual = [step for step in steps if step.seconds <= SLOW_FACTOR * middle]
    more = excess(slow, usual)
    phase = max(more, key=lambda name: more[name])
    return Unsteady(
        worker=worker.name,
        phase=phase,
        seconds=more[phase] * len(slow) / len(steps),
        every=round(len(steps) / len(slow)),
        factor=fmean(step.seconds for step in slow) / middle,
    )
