"""What is wrong with a run, the worst first: seconds that causes charge, and what costs no time."""

from collections.abc import Sequence

from paceline.explain import learning as learn
from paceline.explain.causes import IN_ORDER, RULES
from paceline.explain.causes.pauses import first_steps_excess
from paceline.explain.evidence import Evidence, Inside, Loss
from paceline.explain.findings import CauseName
from paceline.explain.ledger import COMPUTE, FIRST_STEPS, PAUSES, TRANSPORT, WAIT, StepAccount
from paceline.explain.machine import short_of_memory

WORTH_FRACTION = 0.15
"""A loss below this share of the time is not named."""

TOGETHER_FRACTION = 0.20
"""Losses of which each is below that are named, with their sum, if all together are above this."""

LOW_EFFICIENCY = 0.8
"""Compared with a baseline, a run that scales worse than this is never healthy."""

JUDGED_STEPS = 10
"""A run that failed after fewer says nothing about its speed."""


def causes(evidence: Evidence) -> list[Loss]:
    """Return what is wrong, the worst first; an empty list for a healthy run."""
    facts = evidence.facts
    first: list[CauseName] = []
    if evidence.failure:
        first.append("failed")
    if evidence.lost:
        first.append("lost")
    wrong = learn.troubles(facts, evidence.learning)
    first += [name for name in wrong if learn.is_certain(facts, name, wrong)]
    if short_of_memory(facts):
        first.append("memory")
    doubtful = [Loss(name=name, seconds=0.0) for name in wrong if name not in first]
    judged = not evidence.failure or facts.typical.steps >= JUDGED_STEPS
    slow = _worth_naming(evidence) if judged else []
    if slow and slow[0].seconds < WORTH_FRACTION * evidence.whole_seconds:
        slow, doubtful = doubtful, slow
    return [*(Loss(name=name, seconds=0.0) for name in first), *slow, *doubtful]


def _worth_naming(evidence: Evidence) -> list[Loss]:
    found = sorted(
        (loss for loss in charges(evidence) if loss.seconds > 0), key=lambda loss: -loss.seconds
    )
    worth = [loss for loss in found if loss.seconds >= WORTH_FRACTION * evidence.whole_seconds]
    slow = evidence.efficiency is not None and evidence.efficiency < LOW_EFFICIENCY
    together = sum(loss.seconds for loss in found)
    if worth or slow or together >= TOGETHER_FRACTION * evidence.whole_seconds:
        return worth or found[:2]
    return []


def charges(evidence: Evidence) -> list[Loss]:
    """Return the seconds per step that each cause has."""
    ledger = account(evidence)
    return [Loss(name=name, seconds=ledger.seconds(name)) for name in ledger.charged]


def account(evidence: Evidence) -> StepAccount:
    """Charge every second of the typical worker's step, and its pauses, in order of priority."""
    typical = evidence.facts.typical
    accounts = {part.name: part.lost_seconds for part in evidence.parts}
    early = first_steps_excess(evidence.facts) / max(typical.steps, 1)
    accounts |= {
        COMPUTE: typical.compute_seconds,
        PAUSES: typical.paused_seconds,
        FIRST_STEPS: early,
    }
    ledger = StepAccount(accounts)
    _charge_spells(evidence.inside, ledger)
    for rule in IN_ORDER:
        rule.claim(evidence, ledger)
    return ledger


def _charge_spells(inside: Sequence[Inside], ledger: StepAccount) -> None:
    """Charge what was there for a part of the run, whatever its mean over all steps looks like."""
    for one in inside:
        name = one.loss.name
        seconds = one.loss.seconds * one.steps_fraction
        ledger.charge(name, seconds, *RULES[name].accounts, WAIT, TRANSPORT, COMPUTE)
