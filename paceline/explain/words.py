"""Findings in sentences: causes, and the one or two sentences that end a run."""

from collections.abc import Sequence

from paceline.explain import difference, weights
from paceline.explain import learning as learn
from paceline.explain.causes import RULES
from paceline.explain.causes.learning import untrained_in_words
from paceline.explain.causes.spells import blamed, whens
from paceline.explain.evidence import Evidence, Inside, Loss
from paceline.explain.facts import Facts
from paceline.explain.findings import Action, Gain
from paceline.explain.machine import is_full, shortage
from paceline.record.entries import IN_EVALUATION
from paceline.record.wall import START_UP, TEARDOWN
from paceline.units import format_seconds

DOUBTFUL_FRACTION = 0.15
"""A baseline that lost more of its step than this to other processes is doubted."""


FEW_STEPS = 5
"""A verdict on fewer steps says so."""


LONG_SECONDS, LONG_FRACTION = 20.0, 0.5
"""What comes before the first step, or after the last, is said when it takes both."""

SUPERLINEAR = 1.1
"""An efficiency above this says more about the baseline than about this run."""


def cause_text(evidence: Evidence, loss: Loss) -> str:
    """One sentence without its full stop: what costs how much, and what is behind it."""
    inside = [one for one in evidence.inside if one.loss.name == loss.name]
    if not inside:
        return RULES[loss.name].sentence(evidence, _cost(evidence, loss))
    alike: dict[str, list[Inside]] = {}
    for one in inside:
        alike.setdefault(blamed(one), []).append(one)
    first, *others = alike.items()
    rest = [f"; {whens(own)} it is {name}" for name, own in others]
    return _within(first[1]) + "".join(rest)


def _within(alike: Sequence[Inside]) -> str:
    """Slow steps and their cause; those with the same one in the words of the worst."""
    worst = alike[0]
    cost = _cost(worst.evidence, worst.loss)
    text = RULES[worst.loss.name].sentence(worst.evidence, cost)
    return f"{whens(alike)} ({worst.slow.factor:.1f} times as long as the other steps), {text}"


def _cost(evidence: Evidence, loss: Loss) -> str:
    each = "step"
    if evidence.facts.typical.paused_seconds:
        each = "step with its pauses"
    whole, share = format_seconds(evidence.whole_seconds), f"{evidence.share(loss.seconds):.0%}"
    return f"{format_seconds(loss.seconds)} of each {whole} {each} ({share})"


def verdict_text(
    evidence: Evidence,
    causes: Sequence[str],
    best: Action | None,
    *,
    also: str = "",
    small: float | None = None,
) -> str:
    """What ends a run: at most what differs, the worst cause, and what to do first.

    `also`: what else is wrong with what it learns, where that is not the worst. `small`: the sum of
    two losses of which neither would be named alone.
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
    elif small is not None:
        sentences.append(f"{_capital(causes[1])}: {small:.0%} together, and neither is much alone.")
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
    """Weights that should be trained and are not are a mistake, whatever the loss does."""
    cut = weights.untrained(facts)
    if cut is None or cut.why in ("frozen", "zero_gradient") or cut.share < weights.MOST:
        return []
    if learn.stands_still(facts):  # then it is the cause
        return []
    return [f"But {untrained_in_words(cut)}, though they are trained."]


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
    if share is None:
        return f"{text}; "
    if share > SUPERLINEAR:
        return f"{text}, more than workers were added: the baseline was slowed by something else; "
    return f"{text} ({share:.0%} of ideal); "


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


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
