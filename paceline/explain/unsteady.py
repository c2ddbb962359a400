"""Slowness that comes and goes: one step in eight that takes four times as long.

A mean hides it, and its cure is another one than that of a step which is always long.
"""

from dataclasses import dataclass
from statistics import fmean, median

from paceline.explain.facts import Facts, WorkerFacts
from paceline.record import PHASES, Step
from paceline.record.pauses import outside_seconds

SLOW_FACTOR = 1.5
"""A slow step takes this many times the median."""

RAREST, COMMONEST = 0.02, 0.4
"""Shares of slow steps between which slowness comes and goes."""

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

    every: int
    """One step in so many."""

    factor: float
    """Time of a slow step over the median's."""


def unsteady(facts: Facts) -> Unsteady | None:
    """The worker and the phase behind slow steps; None where steps are alike."""
    found = [one for worker in facts.workers if (one := _of_worker(worker)) is not None]
    own = [one for one in found if one.phase in OWN_PHASES]
    return max(own or found, key=lambda one: one.seconds, default=None)


def _of_worker(worker: WorkerFacts) -> Unsteady | None:
    steps = worker.entries
    if len(steps) < FEWEST_STEPS:
        return None
    middle = median(step.seconds for step in steps)
    slow = [step for step in steps if step.seconds > SLOW_FACTOR * middle]
    if len(slow) < 2 or not RAREST <= len(slow) / len(steps) <= COMMONEST:
        return None
    usual = [step for step in steps if step.seconds <= SLOW_FACTOR * middle]
    excess = {
        phase: fmean(_phase(s, phase) for s in slow) - fmean(_phase(s, phase) for s in usual)
        for phase in (*PHASES, "outside")
    }
    phase = max(excess, key=lambda name: excess[name])
    return Unsteady(
        worker=worker.name,
        phase=phase,
        seconds=excess[phase] * len(slow) / len(steps),
        every=round(len(steps) / len(slow)),
        factor=fmean(step.seconds for step in slow) / middle,
    )


def _phase(step: Step, phase: str) -> float:
    if phase == "outside":
        return outside_seconds(step)
    return step.breakdown_seconds.get(phase, 0.0)
