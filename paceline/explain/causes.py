"""Which losses are worth a sentence, and how they arose. Rules over facts and parts; no prose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.explain.facts import Facts, WorkerFacts, own_seconds
from paceline.explain.findings import CauseName, Late, Part

WORTH_FRACTION = 0.15
"""A loss below this share of the step is not named."""

NOTICED_FRACTION = 0.02
"""Nobody is called late for less than this share of the step."""

HEALTHY_FRACTION = 0.20
"""All losses together below this share of the step: nothing to mend."""

BY_PART: dict[str, CauseName] = {
    "input": "input",
    "exchange: bandwidth": "slow-link",
    "exchange: latency": "latency",
    "exchange: server queueing": "server",
    "exchange: transport": "transport",
    "overhead": "overhead",
}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A cause and its cost per step."""

    name: CauseName
    seconds: float


def losses(
    facts: Facts, parts: Sequence[Part], late: Late | None, baseline: Facts | None
) -> list[Loss]:
    """The losses worth naming, the largest first; empty when the run is healthy."""
    step, lost = facts.typical.step_seconds, {part.name: part.lost_seconds for part in parts}
    found = [Loss(name=BY_PART[n], seconds=s) for n, s in lost.items() if n in BY_PART]
    found += [
        Loss(name=_cause_of_wait(late), seconds=lost.get("wait", 0.0)),
        Loss(name=_cause_of_compute(facts, baseline), seconds=lost.get("compute", 0.0)),
    ]
    found = _gather_fixed_costs(facts, found)
    found = sorted((loss for loss in found if loss.seconds > 0), key=lambda loss: -loss.seconds)
    worth = [loss for loss in found if loss.seconds >= WORTH_FRACTION * step]
    healthy = sum(loss.seconds for loss in found) < HEALTHY_FRACTION * step
    return [] if healthy else worth or found[:1]


def find_late(facts: Facts) -> Late | None:
    """The worker the others wait for; None when nobody is late for a reason of its own.

    Everyone's exchange ends together, so durations say nothing: the moment at which gradients were
    ready tells who is last, and the worker's own phases beside the typical worker's tell why.
    """
    typical = facts.typical
    last = max(facts.workers, key=lambda worker: worker.late_seconds)
    if last is typical or typical.phases["wait"] < NOTICED_FRACTION * typical.step_seconds:
        return None
    # Chance delays make someone last in every step too; a late worker is slower on average.
    excess = {reason: last_s - own for reason, (last_s, own) in _compare(last, typical).items()}
    reason = max(excess, key=lambda name: excess[name])
    if excess[reason] < 0.5 * typical.phases["wait"]:
        return None
    slow, usual = _compare(last, typical)[reason]
    return Late(
        worker=last.name,
        reason=reason,
        seconds=last.late_seconds - typical.late_seconds,
        last_fraction=last.last_fraction,
        factor=slow / usual if usual > 0 else None,
    )


Reason = Literal["input", "compute", "link", "overhead"]


def _compare(last: WorkerFacts, typical: WorkerFacts) -> dict[Reason, tuple[float, float]]:
    """Seconds of the late and of the typical worker, for each thing that may make it late."""
    return {
        "input": (last.phases["input"], typical.phases["input"]),
        "compute": (last.compute_seconds, typical.compute_seconds),
        "link": (last.phases["exchange_exposed"], typical.phases["exchange_exposed"]),
        "overhead": (last.overhead_seconds, typical.overhead_seconds),
    }


def _cause_of_wait(late: Late | None) -> CauseName:
    if late is None:
        return "jitter"
    return "slow-link" if late.reason == "link" else "slow-worker"


def _cause_of_compute(facts: Facts, baseline: Facts | None) -> CauseName:
    """Compute takes longer per sample than in the baseline: too few at once, or too little room."""
    smaller = baseline is not None and facts.typical.samples < 0.75 * baseline.typical.samples
    return "small-batch" if smaller else "compute"


def fixed_seconds(worker: WorkerFacts, transport_seconds: float) -> float:
    """What a step costs however few samples it has, links and other members aside."""
    return worker.phases["update"] + worker.overhead_seconds + transport_seconds


def _gather_fixed_costs(facts: Facts, found: list[Loss]) -> list[Loss]:
    """Costs that do not grow with the batch, above those that do: the batch is too small."""
    by_name = {name: sum(x.seconds for x in found if x.name == name) for name in BY_PART.values()}
    transport = by_name["transport"] + by_name["latency"]
    typical = facts.typical
    per_sample = own_seconds(typical) - typical.phases["update"] - typical.overhead_seconds
    fixed = fixed_seconds(typical, transport)
    if fixed <= per_sample or fixed <= by_name["slow-link"] + by_name["server"]:
        return found
    gathered = {"transport", "latency", "overhead"}
    small = sum(x.seconds for x in found if x.name in (*gathered, "small-batch"))
    kept = [x for x in found if x.name not in (*gathered, "small-batch")]
    return [*kept, Loss(name="small-batch", seconds=small)]
