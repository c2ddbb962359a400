"""Causes in waiting for another worker: one that is slow, one in turn, stages of a pipeline."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from paceline import spec
from paceline.explain.causes.rule import CauseRule, charge_rest
from paceline.explain.changes import FEW_SAMPLES, architecture_of, without_slowdown
from paceline.explain.evidence import Evidence
from paceline.explain.facts import own_seconds
from paceline.explain.findings import Action, Late
from paceline.explain.ledger import WAIT, StepAccount
from paceline.explain.needs import gain, spared
from paceline.explain.turns import turns
from paceline.units import format_seconds

UNEVEN_STAGES = 1.5
"""A pipeline's longest stage that takes this many times the shortest bounds it."""


def _against_wait(evidence: Evidence) -> Iterator[Action]:
    facts, needs, late = evidence.facts, evidence.needs, evidence.late
    if late is None:
        yield Action(text="let no step wait for all: server:mode=quorum or bounded")
        return
    typical = own_seconds(facts.typical)
    even = replace(needs, own={n: min(s, typical) for n, s in needs.own.items()})
    if late.reason != "share":
        text = f"bring {late.reason} of {all_late(late)} to the others' pace"
        if late.reason == "overhead":
            text = f"look at what {all_late(late)} does between optimizer.step() and the next "
            text += "batch: logging, checkpoints, a slow disk"
        change = without_slowdown(facts, (late.worker, *late.alike))
        yield Action(text=text, gain=gain(needs, even), change=change, effort="script")
    if late.reason in ("compute", "share"):
        yield from _shares(evidence)


def _shares(evidence: Evidence) -> Iterator[Action]:
    """Samples dealt so that all workers are ready together."""
    facts, needs = evidence.facts, evidence.needs
    grows = {w.name: w.phases["forward"] + w.phases["backward"] for w in facts.workers}
    if not all(grows.values()) or not facts.together:
        return
    rates = {w.name: w.samples / grows[w.name] for w in facts.workers}
    seconds = sum(w.samples for w in facts.workers) / sum(rates.values())
    own = {name: needs.own[name] - grows[name] + seconds for name in needs.own}
    mean = sum(rates.values()) / len(rates)
    shares = [round(rate / mean, 2) for rate in rates.values()]
    text = f"deal each batch by speed: shares = {shares}"
    yield Action(text=text, gain=gain(needs, replace(needs, own=own)), change={"shares": shares})


def _against_bubble(evidence: Evidence) -> Iterator[Action]:
    """Stages that are longer than the others bound a pipeline whatever else is done."""
    facts, needs, kind = evidence.facts, evidence.needs, evidence.facts.architecture.staging
    if kind is None:
        return
    stages, parts = facts.summary.workers // kind.replicas, kind.microbatches
    each = parts
    while each < 4 * stages and facts.typical.samples >= 2 * each * FEW_SAMPLES:
        each *= 2
    if each > parts:
        more = msgspec.structs.replace(kind, microbatches=each)
        text = f"try {each} parts of the batch in place of {parts}: microbatches={each}"
        # Smaller parts keep fewer workers waiting, and use a device less well.
        then = needs.pace + (sum(needs.own.values()) / kind.replicas - needs.pace) / each
        most = max(0.0, needs.step - then)
        gained = spared(needs, 0.3 * most, most)
        yield Action(text=text, gain=gained, change=architecture_of(more))
    elif parts < stages:
        yield Action(text="raise the batch, and cut it into more parts: microbatches")
    if each == parts or needs.pace > UNEVEN_STAGES * min(needs.own.values()):
        # All layers on each worker, for a part of the samples: nobody waits for a stage.
        even = sum(needs.own.values()) / len(needs.own)
        low, high = (needs.step - factor * even for factor in (1.4, 1.0))
        if low > 0:
            text = "let every worker train the whole model on its part of the batch, if it fits: "
            text += "ring, or server:placement=colocated"
            change = architecture_of(spec.Ring())
            yield Action(text=text, gain=spared(needs, low, high), change=change)


def all_late(late: Late) -> str:
    """Who is late, by name as long as they are few."""
    if len(late.alike) > 2:
        return f"{late.worker} and {len(late.alike)} others"
    return " and ".join(sorted((late.worker, *late.alike)))


REASONS = {"input": "input", "compute": "compute", "link": "exchange"}


def _waiting(late: Late | None, cost: str) -> str:
    if late is None:
        return f"waiting for the slowest worker takes {cost}"
    many = bool(late.alike)
    its, it, is_late = ("their", "they", "are") if many else ("its", "it", "is")
    has, does = ("have", "do") if many else ("has", "does")
    if late.reason == "share":
        why = f"{it} {has} {late.factor or 0:.1f} times the typical worker's samples"
    elif late.reason == "overhead":
        why = f"{it} {does} something else between steps"
    elif late.factor is not None:
        why = f"{its} {REASONS[late.reason]} takes {late.factor:.1f} times the typical worker's"
    else:
        why = f"{its} {REASONS[late.reason]} takes longer than the typical worker's"
    by = format_seconds(late.seconds)
    return f"waiting for {all_late(late)} takes {cost}: {why}, and {it} {is_late} {by} late"


def _bubble_in_words(evidence: Evidence, cost: str) -> str:
    own = evidence.needs.own
    longest = max(own, key=lambda name: own[name])
    text = f"workers of the pipeline wait for each other's stages {cost}"
    if own[longest] > UNEVEN_STAGES * min(own.values()):
        text += f"; stages are uneven: that of {longest} takes {format_seconds(own[longest])}, "
        text += f"the shortest {format_seconds(min(own.values()))}"
    return text


def _claim_bubble(evidence: Evidence, ledger: StepAccount) -> None:
    if evidence.facts.architecture.staging is not None:  # stages wait by design
        ledger.charge_all("bubble", WAIT)


def _claim_late(evidence: Evidence, ledger: StepAccount) -> None:
    if evidence.late is not None:
        ledger.charge_all("slow-worker", WAIT)


def _claim_turns(evidence: Evidence, ledger: StepAccount) -> None:
    if turns(evidence.facts) is not None:
        ledger.charge_all("rotating", WAIT)


def _turns_in_words(evidence: Evidence, cost: str) -> str:
    found = turns(evidence.facts)
    assert found is not None
    order = ", ".join(found.order[:4]) + (", …" if len(found.order) > 4 else "")
    text = f"the workers are late in turn ({order}), each for {found.steps_each:g} "
    text += f"step{'s' if found.steps_each != 1 else ''}: {found.phase} of the one in turn takes "
    text += f"{found.factor:.1f} times as long, and waiting for it takes {cost}"
    return text


def _against_turns(evidence: Evidence) -> Iterator[Action]:
    """Without the turns no step has a late worker: the wait goes with the excess of the turn."""
    found, needs = turns(evidence.facts), evidence.needs
    assert found is not None
    text = f"look at what each worker does in its turn that makes its {found.phase} long: "
    text += "checkpoints, logging, samples of uneven length, a job that moves from host to host"
    promised = spared(needs, 0.7 * found.seconds, found.seconds)
    yield Action(text=text, gain=promised, effort="script")


CAUSES = (
    CauseRule(
        name="bubble",
        title="stages of a pipeline wait for each other",
        proof="wait and computing of each stage",
        claim=_claim_bubble,
        priority=82,
        of_experiment=True,
        sentence=_bubble_in_words,
        advice=_against_bubble,
    ),
    CauseRule(
        name="slow-worker",
        title="one worker is late, or several alike: by computing, input, more samples than the "
        "others, or something between steps",
        proof="`ready_seconds` on one clock",
        claim=_claim_late,
        priority=84,
        accounts=(WAIT,),
        sentence=lambda evidence, cost: _waiting(evidence.late, cost),
        advice=_against_wait,
    ),
    CauseRule(
        name="rotating",
        title="the workers are late in turn",
        proof="`ready_seconds` and phases of the last worker of each step",
        claim=_claim_turns,
        priority=86,
        accounts=(WAIT,),
        sentence=_turns_in_words,
        advice=_against_turns,
    ),
    CauseRule(
        name="jitter",
        title="some worker is last in every step, and no worker more than the others",
        proof="`ready_seconds` on one clock",
        claim=charge_rest("jitter", WAIT),
        priority=90,
        accounts=(WAIT,),
        sentence=lambda evidence, cost: (
            f"waiting for the slowest worker takes {cost}, and it is another one each time: no "
            "worker is slower than the rest"
        ),
        advice=_against_wait,
    ),
)
