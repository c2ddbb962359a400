"""Findings in sentences: causes, and the one or two sentences that end a run."""

from collections.abc import Callable, Sequence

from paceline.explain import difference, limits
from paceline.explain import learning as learn
from paceline.explain.actions import (
    UNEVEN_STAGES,
    all_late,
    paused_by,
    pauses,
    slower_phase,
    traced_anew,
)
from paceline.explain.causes import (
    Evidence,
    Inside,
    Loss,
    far_away,
    first_steps_excess,
    has_fewer_cores,
    late_fraction,
    slow_cable,
    small_pieces,
    threads_each,
)
from paceline.explain.facts import Facts
from paceline.explain.findings import Action, CauseName, Gain, Late
from paceline.explain.loss_words import (
    flat_in_words,
    loss_in_words,
    odd_in_words,
    sorted_in_words,
    unreached_in_words,
)
from paceline.explain.machine import is_full, shortage
from paceline.explain.parts import busiest_server, busiest_worker_link
from paceline.explain.spans import Slowed
from paceline.record.entries import IN_EVALUATION
from paceline.record.wall import START_UP, TEARDOWN
from paceline.units import format_bandwidth, format_bytes, format_seconds

DOUBTFUL_FRACTION = 0.15
"""A baseline that lost more of its step than this to other processes is doubted."""

FEW_STEPS = 5
"""A verdict on fewer steps says so."""

LONG_SECONDS, LONG_FRACTION = 20.0, 0.5
"""What comes before the first step, or after the last, is said when it takes both."""

REASONS = {"input": "input", "compute": "compute", "link": "exchange"}
PAUSES = {
    "script": "the script's own pauses",
    "checkpoint": "checkpoints",
    "evaluation": "evaluations",
    "balancing": "divisions of the batch",
    "recovery": "recoveries from lost members",
    "other": "pauses",
}


def cause_text(evidence: Evidence, loss: Loss) -> str:
    """One sentence without its full stop: what costs how much, and what is behind it."""
    inside = [one for one in evidence.inside if one.loss.name == loss.name]
    if not inside:
        return SENTENCES[loss.name](evidence, _cost(evidence.facts, loss))
    alike: dict[str, list[Inside]] = {}
    for one in inside:
        alike.setdefault(_blamed(one), []).append(one)
    first, *others = alike.items()
    rest = [f"; {_whens(own)} it is {name}" for name, own in others]
    return _within(first[1]) + "".join(rest)


def _blamed(inside: Inside) -> str:
    """Who makes steps slow, where the cause is somebody."""
    late = inside.evidence.late
    named = inside.loss.name in ("slow-worker", "slow-cable") and late is not None
    return all_late(late) if named and late is not None else ""


def _within(alike: Sequence[Inside]) -> str:
    """Slow steps and their cause; those with the same one in the words of the worst."""
    worst = alike[0]
    text = SENTENCES[worst.loss.name](worst.evidence, _cost(worst.evidence.facts, worst.loss))
    return f"{_whens(alike)} ({worst.slow.factor:.1f} times as long as the other steps), {text}"


def _whens(alike: Sequence[Inside]) -> str:
    return " and ".join(_when(one.slow) for one in alike)


def verdict_text(
    evidence: Evidence, causes: Sequence[str], best: Action | None, *, also: str = ""
) -> str:
    """What ends a run: at most what differs, the worst cause, and what to do first.

    `also`: what else is wrong with what it learns, where that is not the worst.
    """
    facts = evidence.facts
    if not causes:
        sentences = [f"Healthy: {_scaled(evidence)}{_healthy_in_words(evidence)}."]
        return " ".join([*_opening(evidence), *sentences, *_doubts(evidence)])
    first = f"{_scaled(evidence)}{causes[0]}"
    sentences = [*_opening(evidence), f"{_capital(first)}."]
    if best is not None:
        sentences.append(f"Next: {best.text}{gain_text(best.gain)}.")
    if evidence.failure and len(causes) > 1 and facts.typical.steps > 1:
        sentences.append(f"Until then, {causes[1]}.")
    elif evidence.lost and len(causes) > 1:
        sentences.append(f"{_capital(causes[1])}.")
    elif also:
        sentences.append(f"And {also}.")
    return " ".join([*sentences, *_doubts(evidence)])


def _doubts(evidence: Evidence) -> list[str]:
    """What stands beside the steps, and what the verdict does not rest on firmly."""
    if evidence.failure:
        return []
    return [
        *_in_evaluation(evidence.facts),
        *_cut_off(evidence.facts),
        *_beside_steps(evidence.facts),
        *_few(evidence.facts),
        *_doubtful_baseline(evidence),
    ]


def _in_evaluation(facts: Facts) -> list[str]:
    told = [event.text for event in facts.events if event.kind == IN_EVALUATION]
    return [f"But {told[0]}."] if told else []


def _cut_off(facts: Facts) -> list[str]:
    """Weights that want gradients and get none are a mistake, whatever the loss does."""
    _, lacking, name = learn.not_reached(facts)
    if lacking < learn.MOST or learn.stands_still(facts):  # then it is the cause
        return []
    return [f"But {unreached_in_words(0.0, lacking, name)}, though they are trained."]


def _beside_steps(facts: Facts) -> list[str]:
    """A run that mostly starts, or ends, is not mended by faster steps."""
    wall = facts.summary.wall_seconds
    if wall is None:
        return []
    whole = sum(wall.values())
    places = {START_UP: "before the first step", TEARDOWN: "after the last step"}
    return [
        f"{format_seconds(wall[part])} of {format_seconds(whole)} in all went {where}."
        for part, where in places.items()
        if wall.get(part, 0.0) > max(LONG_SECONDS, LONG_FRACTION * whole)
    ]


def _few(facts: Facts) -> list[str]:
    count = facts.typical.steps
    if count >= FEW_STEPS or facts.experiment.engine == "predict":
        return []
    counted = "one step was" if count == 1 else f"{count} steps were"
    return [f"But only {counted} counted, after the first ones: run it for longer."]


def _doubtful_baseline(evidence: Evidence) -> list[str]:
    """A baseline whose cores others used is no measure of anything."""
    baseline = evidence.baseline
    short = shortage(baseline) if baseline is not None else None
    if baseline is None or short is None or short.name != "cpu-taken":
        return []
    share = short.seconds / baseline.typical.step_seconds
    if share < DOUBTFUL_FRACTION:
        return []
    return [f"But others had the baseline's cores for {share:.0%} of each step: measure it again."]


def gain_text(gain: Gain | None) -> str:
    """A range of throughput: " (+20 to +35 % throughput)"; empty when not known."""
    if gain is None:
        return ""
    low, high = (round(100 * value) for value in (gain.low, gain.high))
    shown = f"{low:+d}" if low == high else f"{low:+d} to {high:+d}"
    return f" ({shown} % throughput)"


def ideal_text(facts: Facts, baseline: Facts | None) -> str:
    if baseline is None:
        return f"{facts.typical.name}'s compute alone"
    return f"{baseline.name}'s step for {facts.typical.samples:g} samples"


def _opening(evidence: Evidence) -> list[str]:
    """Two runs: what differs between the experiments, unless it is only the number of workers."""
    if evidence.baseline is None:
        return []
    found = difference.differs(evidence.facts, evidence.baseline)
    return [f"{_capital(difference.opening(found))}."]


def _scaled(evidence: Evidence) -> str:
    if evidence.baseline is None:
        return ""
    text = f"{difference.speedup(evidence.facts, evidence.baseline):.2f} times the baseline's "
    text += "throughput"
    share = evidence.efficiency
    return text + (f" ({share:.0%} of ideal); " if share is not None else "; ")


def _healthy_in_words(evidence: Evidence) -> str:
    facts = evidence.facts
    share = facts.typical.compute_seconds / facts.typical.step_seconds
    step = format_seconds(facts.typical.step_seconds)
    text = f"compute is {share:.0%} of each {step} step"
    if is_full(facts) and facts.computes_here:
        text += f", and the {facts.cores} cores are full"
    found = evidence.learning
    if found is None and facts.experiment.workload.script is not None:
        text += "; whether it learns is not known (add paceline.report_loss(loss) to the loop)"
    if found is not None and found.staleness is not None and found.staleness >= learn.STALE:
        text += f"; gradients are {found.staleness:.1f} updates old on average, and the loss falls "
        text += f"from {found.first:.3g} to {found.last:.3g}"
    return text


def _cost(facts: Facts, loss: Loss) -> str:
    step = facts.typical.step_seconds
    return f"{format_seconds(loss.seconds)} of each {format_seconds(step)} step" + (
        f" ({loss.seconds / step:.0%})"
    )


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


def _cable_in_words(evidence: Evidence, cost: str) -> str:
    facts = evidence.facts
    name = slow_cable(facts, evidence.needs)
    rates = sorted(link.bandwidth_bits_per_second for link in facts.links.values())
    own = format_bandwidth(facts.links[name].bandwidth_bits_per_second)
    usual = format_bandwidth(rates[len(rates) // 2])
    return f"the cable of {name} is slow: {own} where the others have {usual}; it costs {cost}"


def _link_in_words(evidence: Evidence) -> str:
    facts, needs = evidence.facts, evidence.needs
    if not needs.out:
        return ""
    name = busiest_worker_link(needs)
    seconds = max(needs.out[name], needs.into[name])
    cable = format_bandwidth(facts.links[name].bandwidth_bits_per_second)
    return f": {name}'s {cable} link is busy {limits.busy(facts, seconds):.0%} of the time"


def _server_in_words(evidence: Evidence) -> str:
    facts, needs = evidence.facts, evidence.needs
    name = busiest_server(needs)
    work = needs.serving.get(name, 0.0)
    wire = max(needs.out.get(name, 0.0), needs.into.get(name, 0.0))
    what = "its link" if wire >= work else "it"
    return f": {what} is busy {limits.busy(facts, max(work, wire)):.0%} of the time"


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


def _bubble_in_words(evidence: Evidence, cost: str) -> str:
    own = evidence.needs.own
    longest = max(own, key=lambda name: own[name])
    text = f"workers of the pipeline wait for each other's stages {cost}"
    if own[longest] > UNEVEN_STAGES * min(own.values()):
        text += f"; stages are uneven: that of {longest} takes {format_seconds(own[longest])}, "
        text += f"the shortest {format_seconds(min(own.values()))}"
    return text


def _late_work_in_words(evidence: Evidence) -> str:
    facts, kind = evidence.facts, evidence.facts.architecture.serving
    workers = facts.summary.workers
    text = f"{late_fraction(facts):.0%} of the gradients come too late for their step and are "
    text += "computed for nothing"
    if kind is not None and kind.quorum:
        text += f": {kind.quorum} of {workers} workers make a step"
    return text


def _latency_in_words(evidence: Evidence, cost: str) -> str:
    name = far_away(evidence.facts)
    if name:
        delay = format_seconds(evidence.facts.links[name].latency_seconds)
        return f"the delay of {name}'s cable, {delay}, takes {cost}: all messages wait for its"
    return f"the delay of the links takes {cost}: messages wait for each other, not for bandwidth"


def _small_batch_in_words(evidence: Evidence, cost: str) -> str:
    typical = evidence.facts.typical
    text = f"the batch of {typical.samples:g} a worker is too small: "
    text += f"what a step costs with any batch takes {cost}"
    update = typical.phases["update"]
    if update > 0.5 * (typical.step_seconds - typical.phases["forward"]):
        text += f", and most of that is the optimizer's update, {format_seconds(update)}"
    return text


def _transport_in_words(evidence: Evidence, cost: str) -> str:
    size = small_pieces(evidence.facts.architecture)
    pieces = f" in pieces of {format_bytes(size)}" if size is not None else ""
    return f"moving gradients between processes{pieces} takes {cost}{_full(evidence.facts)}"


def _cores_in_words(evidence: Evidence, cost: str) -> str:
    baseline = evidence.baseline
    if baseline is None or not has_fewer_cores(evidence):
        return f"cores are short: waiting for one takes {cost}{_short(evidence)}"
    own, other = threads_each(evidence.facts), threads_each(baseline)
    return (
        f"workers share the {evidence.facts.cores} cores: computing takes {cost} longer with "
        f"{own} of them a worker than with the baseline's {other}"
    )


def _taken_in_words(evidence: Evidence, cost: str) -> str:
    short = evidence.shortage
    if short is not None and short.worker:
        return f"other processes have the core of {short.worker}, whose wait for it takes {cost}"
    return f"other processes have the cores: waiting for one takes {cost}{_short(evidence)}"


def _readers_in_words(evidence: Evidence, cost: str) -> str:
    short = evidence.shortage
    used = f" use {short.readers:.1f} of the {evidence.facts.cores} cores" if short else ""
    return (
        f"processes that prepare samples{used}, which computing needs: "
        f"waiting for cores and samples takes {cost}"
    )


def _short(evidence: Evidence) -> str:
    short, facts = evidence.shortage, evidence.facts
    if short is None:
        return ""
    if short.name == "cpu-taken":
        return f"; they use {short.others:.1f} of {facts.cores}"
    return f"; {short.wanted} threads share {facts.cores} cores"


def _full(facts: Facts) -> str:
    full = facts.experiment.engine in ("here", "tunnel") and is_full(facts)
    return f"; all {facts.cores} cores are busy" if full else ""


def _overhead_in_words(evidence: Evidence, cost: str) -> str:
    traced = traced_anew(evidence.facts)
    text = f"the script spends {cost} outside input, forward, backward and update"
    return f"{traced.partition(':')[0]}, which takes {cost}" if traced else text


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _memory(evidence: Evidence, cost: str) -> str:
    facts = evidence.facts
    left = format_bytes(facts.least_available_bytes or 0)
    return f"memory is full: {left} of {format_bytes(facts.memory_bytes)} were left"


SENTENCES: dict[CauseName, Callable[[Evidence, str], str]] = {
    "failed": lambda e, cost: e.failure,
    "lost": lambda e, cost: e.lost,
    "not-finite": lambda e, cost: loss_in_words(e),
    "diverged": lambda e, cost: loss_in_words(e),
    "staleness": lambda e, cost: loss_in_words(e),
    "chance": lambda e, cost: loss_in_words(e),
    "flat": lambda e, cost: flat_in_words(e),
    "same-samples": lambda e, cost: (
        "all workers train on the same samples: their losses are equal in every step"
    ),
    "sorted-samples": lambda e, cost: sorted_in_words(e),
    "odd-worker": lambda e, cost: odd_in_words(e),
    "memory": _memory,
    "cores": lambda e, cost: _cores_in_words(e, cost),
    "cpu-taken": _taken_in_words,
    "readers": _readers_in_words,
    "pauses": lambda e, cost: _pauses_in_words(e.facts),
    "first-steps": lambda e, cost: _first_steps_in_words(e.facts),
    "intermittent": lambda e, cost: _unsteady_in_words(e, cost),
    "slow-cable": lambda e, cost: _cable_in_words(e, cost),
    "slow-link": lambda e, cost: (
        f"the link is too slow for this exchange, which takes {cost}{_link_in_words(e)}"
    ),
    "latency": _latency_in_words,
    "compression": lambda e, cost: f"compressing gradients takes {cost}, and saves less than that",
    "transport": _transport_in_words,
    "bubble": _bubble_in_words,
    "late-work": lambda e, cost: _late_work_in_words(e),
    "slowed": _slowed_in_words,
    "server": lambda e, cost: (
        f"queueing at {busiest_server(e.needs)} takes {cost}{_server_in_words(e)}"
    ),
    "slow-worker": lambda e, cost: _waiting(e.late, cost),
    "jitter": lambda e, cost: (
        f"waiting for whoever is last takes {cost}; no worker is slower than the rest"
    ),
    "input": lambda e, cost: f"the input is too slow: workers wait for samples {cost}",
    "small-batch": _small_batch_in_words,
    "compute": lambda e, cost: (
        f"computing, mostly {slower_phase(e)}, takes {cost} longer than in the baseline"
    ),
    "overhead": _overhead_in_words,
}
"""What is said of each cause, without its full stop; `cost` is its share of a step in words."""
