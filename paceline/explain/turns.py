"""Workers that are late in turn: in each step another one, in an order that repeats."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean, median

from paceline.explain.facts import Facts
from paceline.explain.phases import OWN_PHASES, part_of
from paceline.record import Step

FEWEST_TURNS = 4
"""LateTurns from which an order can be told."""

IN_ORDER = 0.8
"""Share of the turns that follow the order in which workers first came."""

LATE_FACTOR = 1.3
"""The part of a step that makes the one in turn late takes this many times its usual time."""


@dataclass(frozen=True, kw_only=True)
class LateTurns:
    """The order in which workers are late, and what makes them so."""

    order: tuple[str, ...]
    steps_each: float
    phase: str
    seconds: float
    """What all lose per step: the excess of the worker in turn."""

    factor: float


def turns(facts: Facts) -> LateTurns | None:
    """Return who is late in turn; None where the last worker is the same, or follows no order."""
    by_step = _by_step(facts)
    if not facts.together or len(facts.workers) < 2 or not by_step:
        return None
    last = [max(steps, key=lambda name: _own(steps[name])) for _, steps in sorted(by_step.items())]
    each = [(name, len(list(run))) for name, run in groupby(last)]
    order = tuple(dict.fromkeys(name for name, _ in each))
    if len(order) < len(facts.workers) or len(each) < max(FEWEST_TURNS, len(order) + 1):
        return None
    expected = sum(
        order[(order.index(a) + 1) % len(order)] == b for (a, _), (b, _) in pairwise(each)
    )
    if len(order) > 2 and expected < IN_ORDER * (len(each) - 1):
        return None
    steps_each = median(count for _, count in each)
    if len(order) == 2 and not _is_regular([count for _, count in each]):
        return None
    return _excess(
        list(zip(last, (s for _, s in sorted(by_step.items())), strict=True)), order, steps_each
    )


def _is_regular(lengths: Sequence[int]) -> bool:
    """Two workers always alternate; it is an order if all turns are as long."""
    inner = lengths[1:-1] or lengths
    return Counter(inner).most_common(1)[0][1] >= IN_ORDER * len(inner)


def _excess(
    steps: Sequence[tuple[str, dict[str, Step]]], order: tuple[str, ...], steps_each: float
) -> LateTurns | None:
    """What the one in turn does longer than the others do in the same step."""
    parts = {part: [_own_and_usual(own, name, part) for name, own in steps] for part in OWN_PHASES}
    more = {part: fmean(own - usual for own, usual in pairs) for part, pairs in parts.items()}
    phase = max(more, key=lambda part: more[part])
    usual = fmean(other for _, other in parts[phase])
    own = fmean(one for one, _ in parts[phase])
    if own < LATE_FACTOR * usual:
        return None
    return LateTurns(
        order=order,
        steps_each=steps_each,
        phase="something between steps" if phase == "outside" else phase,
        seconds=more[phase],
        factor=own / max(usual, 1e-9),
    )


def _own_and_usual(own: dict[str, Step], name: str, part: str) -> tuple[float, float]:
    """A part of one worker's step, and of the other workers' in the middle."""
    others = [part_of(step, part) for other, step in own.items() if other != name]
    return part_of(own[name], part), median(others)


def _by_step(facts: Facts) -> dict[int, dict[str, Step]]:
    """Steps that all workers have counted, by number."""
    found: dict[int, dict[str, Step]] = {}
    for worker in facts.workers:
        for step in worker.entries:
            found.setdefault(step.step, {})[worker.name] = step
    return {step: own for step, own in found.items() if len(own) == len(facts.workers)}


def _own(step: Step) -> float:
    return sum(part_of(step, part) for part in OWN_PHASES)
