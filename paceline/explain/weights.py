"""Which weights of a script's model training changes, and why the others stay as they are."""

from dataclasses import dataclass
from typing import Any, Literal

from paceline.explain.facts import Facts

MOST = 0.5
"""Share of a model's weights: a training that reaches no more than the rest is no accident."""

STUCK_FRACTION = 1e-5
"""Weights that have moved by less of their size, in tens of steps, are not trained."""

Why = Literal["frozen", "without_gradient", "without_optimizer", "zero_gradient"]
"""Why training does not change weights."""


@dataclass(frozen=True, kw_only=True)
class Untrained:
    """Weights of a script's model that training does not change."""

    why: Why
    share: float
    example: str


def rate_is_zero(facts: Facts) -> bool:
    """Whether every step of the run had a learning rate, and it was 0."""
    rates = [step.learning_rate for step in facts.typical.entries]
    return bool(rates) and all(rate == 0 for rate in rates)


def has_reason(facts: Facts) -> bool:
    """Whether it is known why weights are not trained."""
    cut = untrained(facts)
    cut_off = cut is not None and cut.share >= MOST
    return rate_is_zero(facts) or cut_off or do_not_move(facts)


def untrained(facts: Facts) -> Untrained | None:
    """Return the largest share of the weights that is not trained, and why; None where unknown."""
    found = reach(facts)
    if not found.get("elements"):
        return None
    names = found.get("examples", {})
    why: tuple[Why, ...] = ("without_optimizer", "without_gradient", "frozen", "zero_gradient")
    shares = {one: found.get(one, 0) / found["elements"] for one in why}
    most = max(why, key=lambda one: shares[one])
    if not shares[most]:
        return None
    example = str(names.get(most) or found.get("for_example", ""))
    return Untrained(why=most, share=shares[most], example=example)


def do_not_move(facts: Facts) -> bool:
    """Whether weights are after many steps what they were, but for their last digits."""
    moved = reach(facts).get("moved")
    return moved is not None and moved < STUCK_FRACTION


def stuck_tensors(facts: Facts) -> list[str]:
    """Return the tensors that did not move, where they are most of those that were watched."""
    moves = reach(facts).get("moved_by_tensor", {})
    stuck = [name for name, moved in moves.items() if moved < STUCK_FRACTION]
    return stuck if len(stuck) > MOST * len(moves) else []


def reach(facts: Facts) -> dict[str, Any]:
    """What a worker's script told of its model's weights (`training.reach`); empty for nothing."""
    if facts.architecture.divides_model or facts.experiment.workload.script is None:
        return {}
    told = [member.counters.get("reach") for member in facts.members]
    return next((found for found in told if isinstance(found, dict) and found), {})


def objective(facts: Facts) -> dict[str, Any]:
    """What workers saw of the loss's own operations and labels (`session.observers.objective`)."""
    told = [member.counters.get("objective") for member in facts.members]
    return next((found for found in told if isinstance(found, dict) and found), {})
