"""Causes outside the phases of a step: checkpoints, evaluation, the script, the first steps."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.explain.causes.rule import CauseRule, charge_rest
from paceline.explain.evidence import Evidence
from paceline.explain.facts import Facts
from paceline.explain.findings import Action, Gain
from paceline.explain.ledger import FIRST_STEPS as FIRST
from paceline.explain.ledger import OVERHEAD
from paceline.explain.ledger import PAUSES as BETWEEN
from paceline.explain.needs import gain
from paceline.record.entries import TRACED
from paceline.record.wall import FIRST_STEPS, START_UP, TEARDOWN
from paceline.units import format_seconds

FIRST_STEPS_FRACTION, FIRST_STEPS_SECONDS = 0.3, 2.0
"""First steps that take more of the training than this, beyond what later ones take, are named."""


def first_steps_excess(facts: Facts) -> float:
    """Seconds that the first steps took beyond what later ones take; 0 where not worth a word."""
    wall = facts.summary.wall_seconds
    if wall is None or FIRST_STEPS not in wall:
        return 0.0
    count = facts.experiment.measurement.warmup_steps
    excess = wall[FIRST_STEPS] - count * facts.typical.step_seconds
    training = sum(s for what, s in wall.items() if what not in (START_UP, TEARDOWN))
    large = excess > FIRST_STEPS_FRACTION * training and excess > FIRST_STEPS_SECONDS
    return excess if large else 0.0


ONE_MAKES_FRACTION = 0.8
"""A worker that makes this much of all pauses makes them alone."""


def _against_pauses(evidence: Evidence) -> Iterator[Action]:
    facts, needs = evidence.facts, evidence.needs
    by_kind = pauses(facts)
    what = max(by_kind, key=lambda kind: by_kind[kind])
    rarer = replace(needs, paused=needs.paused - 0.9 * by_kind[what])
    every = facts.experiment.workload.checkpoint_every
    if what == "checkpoint" and every:
        text = f"write a checkpoint every {10 * every} steps in place of {every}"
        change: dict[str, object] = {"checkpoint_every": 10 * every}
        yield Action(text=text, gain=gain(needs, rarer), change=change)
    elif what == "recovery":
        never = replace(needs, paused=needs.paused - by_kind[what])
        text = "find out why members are lost: the run's folder has their logs"
        yield Action(text=text, gain=gain(needs, never))
    else:
        named = "its own pauses" if what == "script" else f"its {what}"
        who = paused_by(facts, what)
        text = f"let the script make {named} ten times as rare"
        if who:
            text = f"let {who} make {named} ten times as rare, or beside training: all wait for it"
        yield Action(text=text, gain=gain(needs, rarer))


def pauses(facts: Facts) -> dict[str, float]:
    """Seconds per step of the typical worker's pauses, by kind."""
    found: dict[str, float] = {}
    for step in facts.typical.entries:
        for what, seconds in step.paused_seconds.items():
            found[what] = found.get(what, 0.0) + seconds / facts.typical.steps
    return found


def paused_by(facts: Facts, what: str) -> str:
    """The one worker that makes pauses of a kind while the others wait; empty for all, and for
    checkpoints, which one worker writes for all."""
    if what not in ("script", "evaluation"):
        return ""
    made = {worker.name: worker.own_pauses.get(what, 0.0) for worker in facts.workers}
    most = max(made, key=lambda name: made[name])
    alone = len(made) > 1 and made[most] > ONE_MAKES_FRACTION * sum(made.values())
    return most if alone else ""


def _leaner_script(evidence: Evidence) -> Action:
    facts, needs = evidence.facts, evidence.needs
    outside = {worker.name: worker.overhead_seconds for worker in facts.workers}
    most = replace(needs, own={n: s - outside[n] for n, s in needs.own.items()})
    half = replace(needs, own={n: s - outside[n] / 2 for n, s in needs.own.items()})
    promised = Gain(low=gain(needs, half).low, high=gain(needs, most).high)
    text = "look at what the script does between the optimizer's step and the next batch"
    if traced_anew(facts):
        text = "call the tf.function with tensors of one shape, and no Python numbers"
    return Action(text=text, gain=promised)


def traced_anew(facts: Facts) -> str:
    """What TensorFlow's side told of a step that is compiled again and again; empty for nothing."""
    return next((event.text for event in facts.events if event.kind == TRACED), "")


PAUSES = {
    "script": "the script's own pauses",
    "checkpoint": "checkpoints",
    "evaluation": "evaluations",
    "balancing": "divisions of the batch",
    "recovery": "recoveries from lost members",
    "other": "pauses",
}


def _pauses_in_words(facts: Facts) -> str:
    by_kind = pauses(facts)
    what = max(by_kind, key=lambda kind: by_kind[kind])
    whole = facts.typical.step_seconds + facts.typical.paused_seconds
    share = facts.typical.paused_seconds / whole
    rate = sum(w.samples / (w.step_seconds + w.paused_seconds) for w in facts.workers)
    who = paused_by(facts, what)
    text = f"{PAUSES.get(what, what)}{f' on {who}' if who else ''} take {share:.0%} of the time"
    text += ", and the others wait: " if who else ": "
    text += f"{_rate(rate)} samples/s in all, {_rate(facts.samples_per_second)} while training"
    return text


def _rate(samples_per_second: float) -> str:
    """Three figures, and never an exponent."""
    if samples_per_second >= 1000:
        return f"{samples_per_second:,.0f}"
    return f"{samples_per_second:.3g}"


def _first_steps_in_words(facts: Facts) -> str:
    wall = facts.summary.wall_seconds
    assert wall is not None
    seconds, whole = first_steps_excess(facts), sum(wall.values())
    count = facts.experiment.measurement.warmup_steps
    return (
        f"the first {count} steps take {format_seconds(seconds)} longer than as many later ones, "
        f"of {format_seconds(whole)} in all"
    )


def _overhead_in_words(evidence: Evidence, cost: str) -> str:
    traced = traced_anew(evidence.facts)
    text = f"the script spends {cost} outside input, forward, backward and update"
    return f"{traced.partition(':')[0]}, which takes {cost}" if traced else text


CAUSES = (
    CauseRule(
        name="pauses",
        title="evaluation, checkpoints, or the script's own pauses",
        proof="`paused_seconds` of steps",
        claim=charge_rest("pauses", BETWEEN),
        sentence=lambda evidence, cost: _pauses_in_words(evidence.facts),
        advice=_against_pauses,
    ),
    CauseRule(
        name="first-steps",
        title="the first steps took most of a short run",
        proof="wall time",
        claim=charge_rest("first-steps", FIRST),
        sentence=lambda evidence, cost: _first_steps_in_words(evidence.facts),
        advice=lambda evidence: [Action(text="train longer: the first steps are paid once")],
    ),
    CauseRule(
        name="overhead",
        title="the script does something between the phases of every step",
        proof="step minus its phases",
        claim=charge_rest("overhead", OVERHEAD),
        priority=90,
        accounts=(OVERHEAD,),
        sentence=_overhead_in_words,
        advice=lambda evidence: [_leaner_script(evidence)],
    ),
)
