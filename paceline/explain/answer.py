"""Put facts, parts, limits, causes and words together."""

from dataclasses import replace
from functools import partial

from paceline.errors import RecordError
from paceline.explain import difference, failure, limits, words
from paceline.explain.actions import actions
from paceline.explain.causes import Evidence, Loss, causes, first_steps_excess
from paceline.explain.facts import Facts, gather
from paceline.explain.findings import Cause, Explanation, WallPart
from paceline.explain.inside import Gather, inside, of_steps
from paceline.explain.learning import DOUBTFUL, OF_LEARNING, learning
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
    evidence, beside = _evidence(facts, failed, other, part), other
    found = causes(evidence)
    if other is not None and all(loss.name in DOUBTFUL for loss in found):
        # Better than a sick one is not yet healthy.
        alone = replace(
            evidence,
            parts=parts(facts),
            learning=learning(facts),
            baseline=None,
            efficiency=None,
        )
        found = causes(alone)
        if found:
            evidence, beside = replace(alone, baseline=other, efficiency=evidence.efficiency), None
    step, paused = facts.typical.step_seconds, facts.typical.paused_seconds
    named = tuple(
        Cause(
            name=loss.name,
            seconds=loss.seconds,
            fraction=_fraction(facts, loss, step + paused),
            text=words.cause_text(evidence, loss),
        )
        for loss in found
    )
    todo = tuple(
        action
        for action in actions(evidence, found)
        if not (_shards_weights(facts) and "architecture" in action.change)
    )
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
            also=next((cause.text for cause in named[1:] if cause.name in OF_LEARNING), ""),
        ),
        worker=facts.typical.name,
        steps=facts.typical.steps,
        step_seconds=step,
        ideal_seconds=step - sum(part.lost_seconds for part in evidence.parts),
        ideal=words.ideal_text(facts, beside),
        samples_per_second=facts.samples_per_second,
        samples_per_second_with_pauses=sum(
            w.samples / (w.step_seconds + w.paused_seconds) for w in facts.workers
        ),
        parts=tuple(evidence.parts),
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


def _shards_weights(facts: Facts) -> bool:
    """Whether ranks of an observed job hold parts of the weights: no other architecture does."""
    return facts.summary.architecture in ("fsdp", "fsdp2")


def _fraction(facts: Facts, loss: Loss, step_seconds: float) -> float:
    """Of a step and its pauses; of the whole run for what happens once in it."""
    wall = facts.summary.wall_seconds
    if loss.name == "first-steps" and wall is not None:
        return first_steps_excess(facts) / sum(wall.values())
    return loss.seconds / step_seconds


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
    return max(facts.pacemaker.compute_seconds, exchange)
