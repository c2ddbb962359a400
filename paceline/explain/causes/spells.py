"""Causes with a beginning and an end, and those that come and go."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.explain.causes.input import READ_AHEAD
from paceline.explain.causes.links import joined, slow_cables
from paceline.explain.causes.machine import FREE_CORES
from paceline.explain.causes.rule import CauseRule
from paceline.explain.causes.stragglers import all_late
from paceline.explain.evidence import Evidence, Inside
from paceline.explain.findings import Action, CauseName, Gain
from paceline.explain.ledger import (
    BANDWIDTH,
    COMPUTE,
    INPUT,
    LATENCY,
    OVERHEAD,
    TRANSPORT,
    WAIT,
    StepAccount,
)
from paceline.explain.needs import Needs, gain, spared
from paceline.explain.phases import OWN_PHASES
from paceline.explain.spans import Slowed
from paceline.explain.unsteady import Unsteady

OF_NETWORK: tuple[CauseName, ...] = ("slow-link", "slow-cable", "uplink", "latency", "transport")

ACCOUNTS = {
    "input": (INPUT,),
    "outside": (OVERHEAD,),
    "exchange_exposed": (TRANSPORT, BANDWIDTH, LATENCY),
    "compute": (COMPUTE,),
}
"""Where the seconds of a phase lie in the ledger."""


def _against_unsteady(evidence: Evidence) -> Iterator[Action]:
    found = evidence.unsteady
    assert found is not None
    places = {
        "input": "what its input waits for in those steps (a disk, a cache, a decoder)",
        "outside": "what the script does in those steps (logging, evaluation)",
        "exchange_exposed": "what else uses the network in those steps",
    }
    usual = "what else ran then, memory, or samples of uneven size"
    who = "every worker" if found.everybody else found.worker
    text = f"look at {places.get(found.phase, usual)} on {who}"
    yield Action(text=text, gain=_gain_without(found, evidence.needs))


def _as_before(evidence: Evidence, found: Slowed) -> Action:
    """Every step like those that were not slow."""
    text = _what_changed(found, "all workers" if found.everybody else found.worker)
    return Action(text=text, gain=_gain_without(found, evidence.needs))


def _gain_without(found: Unsteady | Slowed, needs: Needs) -> Gain:
    """If the phase never took longer than it mostly does."""
    if found.phase in ("exchange_exposed", "wait"):
        return spared(needs, 0.5 * found.seconds, found.seconds)
    slow = needs.own if found.everybody else [found.worker]
    own = {n: s - found.seconds if n in slow else s for n, s in needs.own.items()}
    return gain(needs, replace(needs, own=own, chance=max(0.0, needs.chance - found.seconds)))


def as_in_other_steps(evidence: Evidence, inside: Inside) -> Action:
    """What was there for a part of the run is gone from that part."""
    found, cost = inside.slow, inside.loss.seconds * inside.steps_fraction
    late = inside.evidence.late
    who = "all workers"
    if inside.loss.name in ("slow-worker", "slow-cable") and late is not None:
        who = all_late(late)
    elif not found.everybody and found.phase in OWN_PHASES:
        who = found.worker
    if inside.loss.name in OF_NETWORK:
        cable = slow_cables(inside.evidence.facts, inside.evidence.needs)
        place = _what_changed(found, f"the network{f' of {joined(cable)}' if cable else ''}", "")
        text = f"{place}: another job, a cable that fell back to a lower rate"
    else:
        known = {"cpu-taken": FREE_CORES, "input": READ_AHEAD}
        text = known.get(inside.loss.name) or _what_changed(found, who)
    return Action(text=text, gain=spared(evidence.needs, 0.5 * cost, cost))


def _what_changed(
    found: Slowed, who: str, what: str = ": heat, memory, another job, longer samples"
) -> str:
    if found.grows:
        return f"look for what grows with every step of {who}: lists that are kept, heat, memory"
    place = f"at step {found.start if found.start is not None else found.end}"
    if found.start is not None and found.end is not None:
        place = f"between steps {found.start} and {found.end}"
    return f"look at what changed for {who} {place}{what}"


def blamed(inside: Inside) -> str:
    """Who makes steps slow, where the cause is somebody."""
    late = inside.evidence.late
    named = inside.loss.name in ("slow-worker", "slow-cable") and late is not None
    return all_late(late) if named and late is not None else ""


def whens(alike: Sequence[Inside]) -> str:
    return " and ".join(_when(one.slow) for one in alike)


def _unsteady_in_words(evidence: Evidence, cost: str) -> str:
    found = evidence.unsteady
    if found is None:
        return f"slow steps take {cost}"
    phase = {"outside": "time outside all phases", "exchange_exposed": "exchange"}
    named = phase.get(found.phase, found.phase)
    who = "every worker" if found.everybody else found.worker
    return (
        f"one step in {found.every} takes {found.factor:.1f} times as long: {named} of "
        f"{who} takes {cost} on average"
    )


def _slowed_in_words(evidence: Evidence, cost: str) -> str:
    if not evidence.slowed:
        return f"steps became slow: {cost}"
    found = evidence.slowed[0]
    phase = {"outside": "time outside all phases", "exchange_exposed": "exchange"}
    who = "every worker" if found.everybody else found.worker
    more = f"{phase.get(found.phase, found.phase)} of {who} takes {cost} more, on average"
    if found.grows:
        return f"steps grow, to {found.factor:.1f} times the first ones: {more} than at first"
    when = " and ".join(_when(one) for one in evidence.slowed)
    return f"{when}, steps take {found.factor:.1f} times as long: {more}"


def _when(found: Slowed) -> str:
    """The steps that were slow."""
    if found.start is None:
        return f"until step {found.end}"
    return f"from step {found.start} " + ("on" if found.end is None else f"to {found.end}")


def _charge(
    name: CauseName, found: Unsteady | Slowed, evidence: Evidence, ledger: StepAccount
) -> None:
    """Charge slow steps in the worker's own phase, and as the wait that they cause on others."""
    if "readers" in ledger.charged and found.phase == "input":
        return  # reading processes end together: one step in so many waits for all of them
    own = found.everybody or found.worker == evidence.facts.typical.name
    accounts = ACCOUNTS.get(found.phase, ())
    charged = ledger.charge(name, found.seconds, *accounts) if own else 0.0
    if not own or found.phase in OWN_PHASES:
        waiting = len(evidence.facts.workers) - 1 if found.everybody else 1
        ledger.charge(name, waiting * found.seconds, WAIT)
    if not own and not ledger.seconds(name):
        ledger.charge(name, found.seconds - charged, *accounts)


def _claim_intermittent(evidence: Evidence, ledger: StepAccount) -> None:
    if evidence.unsteady is not None:
        _charge("intermittent", evidence.unsteady, evidence, ledger)


def _claim_slowed(evidence: Evidence, ledger: StepAccount) -> None:
    for slow in evidence.slowed:
        _charge("slowed", slow, evidence, ledger)


CAUSES = (
    CauseRule(
        name="slowed",
        title="from one step on, or up to one, steps take longer, or each a little more than the "
        "one before: which phase, of which worker",
        proof="each step's phases",
        claim=_claim_slowed,
        priority=54,
        sentence=_slowed_in_words,
        advice=lambda evidence: [_as_before(evidence, slow) for slow in evidence.slowed],
    ),
    CauseRule(
        name="intermittent",
        title="one step in so many is slow: which phase, of which worker",
        proof="each step's phases",
        claim=_claim_intermittent,
        priority=54,
        sentence=_unsteady_in_words,
        advice=_against_unsteady,
    ),
)
