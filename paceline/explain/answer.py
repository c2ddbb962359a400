"""Put facts, parts, limits, causes and words together."""

from dataclasses import replace
from functools import partial

import msgspec

from paceline.errors import RecordError
from paceline.explain import difference, failure, limits, words
from paceline.explain.accounting import WORTH_FRACTION, account, causes
from paceline.explain.advice import actions
from paceline.explain.causes.pauses import first_steps_excess
from paceline.explain.evidence import Evidence, Loss
from paceline.explain.facts import Facts, gather
from paceline.explain.findings import Cause, Explanation, Part, WallPart
from paceline.explain.inside import Gather, inside, of_steps
from paceline.explain.learning import DOUBTFUL, OF_LEARNING, learning
from paceline.explain.ledger import PAUSES
from paceline.explain.needs import Needs
from paceline.explain.parts import parts
from paceline.explain.reading import ReadOnce
from paceline.explain.spans import slowed
from paceline.explain.unsteady import unsteady
from paceline.record import RunFolder, Summary


def explain(run: RunFolder, baseline: RunFolder | None = None, *, link: str = "") -> Explanation:
    """Where the time of `run` went, beside `baseline` where there is one.

    Without a baseline the ideal is the typical worker's compute alone; with one it is the
    baseline's whole step for as many samples. `link` ("10gbit") names the cables of a real cluster.
    """
    run = ReadOnce(run.path)
    failed = failure.failure(run)
    try:
        facts = gather(run, link)
    except RecordError:
        if not failed:
            raise
        return _only_failed(run, failed)
    part = partial(gather, run, link)
    if baseline is None:
        return _explain(facts, failed, None, part)
    other = gather(baseline, link)
    if facts.name == other.name:  # two runs of one script: their folders tell them apart
        facts = replace(facts, name=run.path.resolve().name)
        other = replace(other, name=baseline.path.resolve().name)
    return _explain(facts, failed, other, part)


def _explain(facts: Facts, failed: str, other: Facts | None, part: Gather) -> Explanation:
    evidence, beside, found = _judged(_evidence(facts, failed, other, part))
    step, shown = facts.typical.step_seconds, _with_losses(evidence)
    named = tuple(
        Cause(
            name=loss.name,
            seconds=loss.seconds,
            fraction=_fraction(evidence, loss),
            text=words.cause_text(evidence, loss),
        )
        for loss in found
    )
    todo = tuple(actions(evidence, found))
    best = next((a for a in todo if not named or named[0].seconds or a.gain is None), None)
    if failed:  # what would make it faster is no answer to that
        best = None
    return Explanation(
        run=facts.name,
        architecture=facts.summary.architecture,
        workers=facts.summary.workers,
        status=facts.summary.status,
        healthy=not named,
        verdict=words.verdict_text(
            evidence,
            [cause.text for cause in named],
            best,
            small=_small_sum(named),
            also=next((cause.text for cause in named[1:] if cause.name in OF_LEARNING), ""),
        ),
        worker=facts.typical.name,
        steps=facts.typical.steps,
        step_seconds=step,
        ideal_seconds=step - sum(part.lost_seconds for part in shown if part.name != PAUSES),
        ideal=words.ideal_text(facts, beside),
        samples_per_second=facts.samples_per_second,
        samples_per_second_with_pauses=sum(
            w.samples / (w.step_seconds + w.paused_seconds) for w in facts.workers
        ),
        parts=shown,
        wall=_wall(facts.summary),
        causes=named,
        resources=tuple(limits.resources(facts, evidence.needs)),
        limit_seconds=_limit_seconds(facts, evidence.needs),
        actions=todo,
        late=evidence.late,
        learning=evidence.learning,
        baseline="" if other is None else other.name,
        differs=() if other is None else difference.differs(facts, other),
        speedup=None if other is None else difference.speedup(facts, other),
        efficiency=evidence.efficiency,
    )


def _judged(evidence: Evidence) -> tuple[Evidence, Facts | None, list[Loss]]:
    """The evidence, the run that is the ideal, if any, and the causes."""
    other, found = evidence.baseline, causes(evidence)
    if other is None or any(loss.name not in DOUBTFUL for loss in found):
        return evidence, other, found
    facts = evidence.facts  # better than a sick baseline is not yet healthy
    own = replace(evidence, parts=parts(facts), learning=learning(facts))
    alone = replace(own, baseline=None, efficiency=None)
    found = causes(alone)
    if not found:
        return evidence, other, []
    return replace(alone, baseline=other, efficiency=evidence.efficiency), None, found


def _evidence(facts: Facts, failed: str, other: Facts | None, part: Gather) -> Evidence:
    slow = slowed(facts)
    within = [inside(facts, one, slow, part) for one in slow]
    return replace(
        of_steps(facts, other),
        unsteady=None if slow else unsteady(facts),
        slowed=tuple(one for one, why in zip(slow, within, strict=True) if why is None),
        learning=learning(facts, other),
        baseline=other,
        efficiency=None if other is None else difference.efficiency(facts, other),
        failure=failed,
        lost=failure.lost(facts),
        inside=tuple(why for why in within if why is not None),
    )


def _fraction(evidence: Evidence, loss: Loss) -> float:
    """Of the run's steps and pauses; of the whole run for its first steps, which come before."""
    wall = evidence.facts.summary.wall_seconds
    if loss.name == "first-steps" and wall is not None:
        return first_steps_excess(evidence.facts) / sum(wall.values())
    return evidence.share(loss.seconds)


def _small_sum(named: tuple[Cause, ...]) -> float | None:
    """The sum of two losses of which neither would be named alone; None where it is otherwise."""
    if len(named) < 2 or not 0 < named[0].fraction < WORTH_FRACTION or not named[1].seconds:
        return None
    return named[0].fraction + named[1].fraction


def _with_losses(evidence: Evidence) -> tuple[Part, ...]:
    """The parts of a step, each with the seconds of it that causes have been charged with."""
    ledger, paused = account(evidence), evidence.facts.typical.paused_seconds
    between = Part(
        name=PAUSES,
        seconds=paused,
        fraction=evidence.share(paused),
        lost_seconds=paused,
        counter=f"{evidence.facts.typical.name}: paused_seconds",
    )
    within = tuple(
        msgspec.structs.replace(part, lost_seconds=ledger.charged_to(part.name))
        for part in evidence.parts
        if part.seconds
    )
    return (*within, between) if paused else within


def _only_failed(run: RunFolder, failed: str) -> Explanation:
    """A run that failed before it could be measured has one thing to say."""
    summary = run.summary()
    text = failed[0].upper() + failed[1:] + "."
    return Explanation(
        run=summary.name or run.path.name,
        architecture=summary.architecture,
        workers=summary.workers,
        status=summary.status,
        healthy=False,
        verdict=text,
        causes=(Cause(name="failed", seconds=0.0, fraction=0.0, text=failed),),
    )


def verdict(run: RunFolder, baseline: RunFolder | None = None) -> str:
    """The sentences that say what limited a run."""
    return explain(run, baseline).verdict


def conclude(run: RunFolder) -> Summary:
    """Add the verdict, and the limit where links are known, to a run's summary; returns it."""
    summary = run.summary()
    try:
        found = explain(run)
    except RecordError:  # no step was finished: there is nothing to say
        return summary
    summary.verdict = found.verdict
    known = any(resource.kind == "link" for resource in found.resources)
    if found.limit_seconds and (known or summary.workers == 1):
        summary.limit_seconds = found.limit_seconds
    run.write_summary(summary)
    return summary


def _wall(summary: Summary) -> tuple[WallPart, ...]:
    wall = summary.wall_seconds
    if wall is None:
        return ()
    whole = sum(wall.values())
    return tuple(WallPart(name=n, seconds=s, fraction=s / whole) for n, s in wall.items())


def _limit_seconds(facts: Facts, needs: Needs) -> float:
    """max(compute, exchange): the closed form where the size is known, else the bytes counted."""
    exchange = limits.closed_form_seconds(facts)
    if exchange is None:
        exchange = max((*needs.out.values(), *needs.into.values()), default=0.0)
    return max(facts.pacemaker.compute_seconds, exchange, *needs.uplinks.values())
