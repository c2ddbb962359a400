"""Uneven parts by measured speed: a slower worker gets fewer samples, so that all end together.

The result does not change, only who computes which part of it: gradients are scaled as for any
uneven shares.
"""

from collections.abc import Sequence
from statistics import median

import torch

from paceline.errors import DeadlineError
from paceline.record import Step
from paceline.session.session import Session
from paceline.session.stores import DEADLINE_SECONDS

GROWS_WITH_SAMPLES = ("input", "forward", "backward")
"""The phases that a smaller part makes shorter; an exchange or an update takes what it takes."""


def speed(steps: Sequence[Step]) -> float:
    """Samples per second of a worker's own computing, from the median step."""
    per_sample = [
        sum(step.breakdown_seconds.get(phase, 0.0) for phase in GROWS_WITH_SAMPLES) / step.samples
        for step in steps
        if step.samples
    ]
    return 1 / max(median(per_sample), 1e-9)


def shares_for(speeds: Sequence[float]) -> list[float]:
    """Return one weight per worker, in proportion to its speed; 1 for a worker of mean speed."""
    mean = sum(speeds) / len(speeds)
    return [own / mean for own in speeds]


def balance(session: Session, shares: list[float]) -> None:
    """Replace `shares` by what the workers' speeds so far suggest.

    Every worker calls it after the same step and computes the same shares.
    """
    if session.store is None:
        return
    key = f"speed/{session.step}"
    session.store.set(f"{key}/{session.rank}", repr(speed(session.steps.recent)))
    speeds = dict.fromkeys(range(session.workers), 1.0)
    for rank in session.participants.members:
        try:
            speeds[rank] = float(session.store.get(f"{key}/{rank}"))
        except (torch.distributed.DistError, RuntimeError) as error:
            operation = "learning the workers' speeds"
            raise DeadlineError(operation, DEADLINE_SECONDS, [f"worker{rank}"]) from error
    shares[:] = shares_for(list(speeds.values()))
    listed = ", ".join(f"{share:.2f}" for share in shares)
    session.note(f"batch divided by measured speed from step {session.step} on: {listed}")
