"""Who is late, and why: the worker the others wait for."""

from typing import Literal

from paceline.explain.facts import Facts, WorkerFacts, own_seconds
from paceline.explain.findings import Late
from paceline.explain.machine import Shortage, waited_seconds

NOTICED_FRACTION = 0.02
"""Nobody is called late for less than this share of the step."""

ALIKE_FRACTION = 0.9
"""Workers whose own time is this share of the last one's are as late as it is."""

EVEN_PACE = 1.15
"""Time per sample within this of the typical worker's is the same speed."""

TELLING_FACTOR = 20.0
"""Beyond it a ratio says only that the typical worker's part is next to nothing."""

Reason = Literal["input", "compute", "share", "link", "overhead"]


def find_late(facts: Facts, shortage: Shortage | None = None) -> Late | None:
    """The worker the others wait for; None when nobody is late for a reason of its own.

    Where cores are short, what a worker waited for one is not its own slowness.

    Everyone's exchange ends together, so durations say nothing: the moment at which gradients were
    ready tells who is last, and the worker's own phases beside the typical worker's tell why.
    """
    typical = facts.typical
    last = max(facts.workers, key=lambda worker: worker.late_seconds)
    if last is typical or typical.phases["wait"] < NOTICED_FRACTION * typical.step_seconds:
        return None
    # Chance delays make someone last in every step too; a late worker is slower on average.
    excess = {reason: last_s - own for reason, (last_s, own) in _compare(last, typical).items()}
    if shortage is not None:
        excess["compute"] -= waited_seconds(facts, last) - waited_seconds(facts, typical)
    reason = max(excess, key=lambda name: excess[name])
    if excess[reason] < 0.5 * typical.phases["wait"]:
        return None
    slow, usual = _compare(last, typical)[reason]
    if reason == "compute" and _has_more_samples(last, typical):
        reason, slow, usual = "share", last.samples, typical.samples
    factor = slow / usual if usual > 0 else None
    return Late(
        worker=last.name,
        reason=reason,
        seconds=last.late_seconds - typical.late_seconds,
        last_fraction=last.last_fraction,
        factor=factor if factor is not None and factor < TELLING_FACTOR else None,
        alike=tuple(w.name for w in facts.workers if w is not last and _is_as_late(w, last)),
    )


def _has_more_samples(last: WorkerFacts, typical: WorkerFacts) -> bool:
    """Whether a worker computes longer only because it has more to compute."""
    if last.samples <= EVEN_PACE * typical.samples:
        return False
    pace = last.compute_seconds / last.samples
    return pace <= EVEN_PACE * typical.compute_seconds / typical.samples


def _is_as_late(worker: WorkerFacts, last: WorkerFacts) -> bool:
    near = worker.late_seconds >= ALIKE_FRACTION * last.late_seconds
    return near and own_seconds(worker) >= ALIKE_FRACTION * own_seconds(last)


def _compare(last: WorkerFacts, typical: WorkerFacts) -> dict[Reason, tuple[float, float]]:
    """Seconds of the late and of the typical worker, for each thing that may make it late."""
    return {
        "input": (last.phases["input"], typical.phases["input"]),
        "compute": (last.compute_seconds, typical.compute_seconds),
        "link": (last.phases["exchange_exposed"], typical.phases["exchange_exposed"]),
        "overhead": (last.overhead_seconds, typical.overhead_seconds),
    }
