"""Put facts, parts, limits, causes and words together."""

from paceline.errors import RecordError
from paceline.explain import limits, words
from paceline.explain.causes import find_late, losses
from paceline.explain.facts import Facts, gather
from paceline.explain.findings import Cause, Explanation
from paceline.explain.parts import parts
from paceline.record import RunFolder, Summary


def explain(run: RunFolder, baseline: RunFolder | None = None, *, link: str = "") -> Explanation:
    """Where the time of `run` went, beside `baseline` where there is one.

    Without a baseline the ideal is the typical worker's compute alone; with one it is the
    baseline's whole step for as many samples. `link` ("10gbit") names the cables of a real cluster.
    """
    return _explain(gather(run, link), None if baseline is None else gather(baseline, link))


def _explain(facts: Facts, other: Facts | None) -> Explanation:
    taken_apart, late = parts(facts, other), find_late(facts)
    found = losses(facts, taken_apart, late, other)
    step = facts.typical.step_seconds
    causes = tuple(
        Cause(
            name=loss.name,
            seconds=loss.seconds,
            fraction=loss.seconds / step,
            text=words.cause_text(facts, loss, late, other),
        )
        for loss in found
    )
    needs, actions = limits.resources(facts), words.actions(facts, found, late)
    sentences = [cause.text for cause in causes]
    best = actions[0] if actions else None
    return Explanation(
        run=facts.name,
        architecture=facts.summary.architecture,
        workers=facts.summary.workers,
        worker=facts.typical.name,
        steps=facts.typical.steps,
        step_seconds=step,
        ideal_seconds=step - sum(part.lost_seconds for part in taken_apart),
        ideal=_ideal_in_words(facts, other),
        healthy=not causes,
        verdict=words.verdict_text(facts, sentences, best, other),
        parts=taken_apart,
        causes=causes,
        resources=tuple(needs),
        limit_seconds=_limit_seconds(facts),
        actions=tuple(actions),
        late=late,
        baseline="" if other is None else other.name,
    )


def verdict(run: RunFolder, baseline: RunFolder | None = None) -> str:
    """The one sentence that says what limited a run."""
    return explain(run, baseline).verdict


def conclude(run: RunFolder) -> Summary:
    """Add the verdict, and the limit where links are known, to a run's summary; returns it."""
    summary = run.summary()
    try:
        facts = gather(run)
    except RecordError:  # no step was finished: there is nothing to say
        return summary
    found = _explain(facts, None)
    summary.verdict = found.verdict
    if facts.links or not facts.exchanges:
        summary.limit_seconds = found.limit_seconds
    run.write_summary(summary)
    return summary


def _limit_seconds(facts: Facts) -> float:
    """max(compute, exchange): the closed form where the size is known, else the bytes counted."""
    compute = facts.pacemaker.compute_seconds
    exchange = limits.closed_form_seconds(facts)
    if exchange is None:
        found = [limits.link_seconds(facts, role) for role in ("worker", "server")]
        exchange = max((seconds for _, seconds in filter(None, found)), default=0.0)
    return max(compute, exchange)


def _ideal_in_words(facts: Facts, baseline: Facts | None) -> str:
    if baseline is None:
        return f"{facts.typical.name}'s compute alone"
    return f"{baseline.name}'s step for {facts.typical.samples:g} samples"
