"""A run that was slow for a part of it: those steps, explained by themselves.

What they lose and the others do not is the cause; over all steps it would be half as large, or look
like another one.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

from paceline.explain.accounting import charges
from paceline.explain.causes import RULES
from paceline.explain.evidence import Evidence, Inside, Loss
from paceline.explain.facts import Facts, WorkerFacts
from paceline.explain.findings import CauseName
from paceline.explain.lateness import find_late
from paceline.explain.machine import shortage
from paceline.explain.needs import needs_of
from paceline.explain.parts import parts
from paceline.explain.spans import Slowed

EXPLAINS_FRACTION = 0.5
"""A cause explains slow steps when it is this much of what they take longer."""

Gather = Callable[[Callable[[int], bool]], Facts]
"""Facts of the steps for which a function is true."""


def inside(facts: Facts, slow: Slowed, all_slow: Sequence[Slowed], gather: Gather) -> Inside | None:
    """What slow steps lose that others do not; None where no cause but their length is found."""
    if slow.grows:
        return None
    usual = _longest_other(facts.typical, all_slow)
    if usual is None:
        return None
    within, without = of_steps(gather(slow.holds)), of_steps(gather(usual))
    longer = within.facts.typical.step_seconds - without.facts.typical.step_seconds
    before: dict[CauseName, float] = {loss.name: loss.seconds for loss in charges(without)}
    more = [
        Loss(name=loss.name, seconds=loss.seconds - before.get(loss.name, 0.0))
        for loss in charges(within)
    ]
    worst = max(more, key=lambda loss: loss.seconds, default=None)
    if worst is None or longer <= 0 or worst.seconds < EXPLAINS_FRACTION * longer:
        return None
    if RULES[worst.name].of_experiment or before.get(worst.name, 0.0) > worst.seconds:
        return None  # it is always there, and was worse for a while
    share = within.facts.typical.steps / facts.typical.steps
    return Inside(slow=slow, evidence=within, loss=worst, steps_fraction=share)


def _longest_other(worker: WorkerFacts, slow: Sequence[Slowed]) -> Callable[[int], bool] | None:
    """Return the usual steps that lie together: counters grow evenly between samples only.

    None where every step of the worker is a slow one, as of one that joined late.
    """
    numbers = [step.step for step in worker.entries]
    runs = [list(run) for _, run in groupby(numbers, lambda n: any(s.holds(n) for s in slow))]
    usual = [run for run in runs if not any(one.holds(run[0]) for one in slow)]
    if not usual:
        return None
    longest = max(usual, key=len)
    return lambda step: longest[0] <= step <= longest[-1]


def of_steps(facts: Facts, baseline: Facts | None = None) -> Evidence:
    """What steps tell by themselves: nothing about how a run ended or what it learnt."""
    short = shortage(facts)
    return Evidence(
        facts=facts,
        needs=needs_of(facts),
        parts=parts(facts, baseline),
        late=find_late(facts, short),
        shortage=short,
    )
