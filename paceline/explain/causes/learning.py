"""Causes in what a run learns: losses that rise, stand still or are no numbers, and samples."""

from collections.abc import Iterator

import msgspec

from paceline.explain import learning as learn
from paceline.explain import samples, weights
from paceline.explain.causes.rule import CauseRule
from paceline.explain.changes import architecture_of, server_of
from paceline.explain.evidence import Evidence
from paceline.explain.facts import Facts
from paceline.explain.findings import Action, Learning


def _not_finite_in_words(evidence: Evidence, cost: str) -> str:
    facts, found = evidence.facts, evidence.learning
    wrong = learn.wrong_number(facts)
    if wrong:
        return f"{wrong}: nothing is learnt from there on"
    assert found is not None
    text = f"the loss is not a number from step {found.not_finite_from} on: nothing is learnt"
    who = learn.first_wrong(facts)
    return text + (f"; it began on {who}" if who else "") + _rate_in_words(found)


def _diverged_in_words(evidence: Evidence, cost: str) -> str:
    facts, found = evidence.facts, evidence.learning
    assert found is not None
    ended = ""
    if found.not_finite_from is not None:
        ended = f", and is not a number from step {found.not_finite_from} on"
    if learn.has_sunk(facts, found):
        low = min(learn.finite(facts).values())
        text = f"the loss falls without an end, from {found.first:.3g} to {low:.3g}{ended}"
        return f"{text}: its sign is wrong, or nothing limits what it rewards"
    if found.not_finite_from is not None:
        step, worst = learn.worst(facts)
        text = f"the loss rises from {found.first:.3g} to {worst:.3g} at step {step}{ended}"
    elif learn.has_risen(facts, found):
        text = f"the loss rises from {found.first:.3g} to {found.last:.3g}"
    elif learn.has_forgotten(facts, found) and found.best is not None:
        text = f"the loss had fallen from {found.first:.3g} to {found.best[1]:.3g} by step "
        text += f"{found.best[0]}, and is {found.last:.3g} at the end"
    else:
        step, worst = learn.worst(facts)
        text = f"the loss rose to {worst:.3g} at step {step}, from {found.first:.3g}"
    return text + _age_in_words(found) + _rate_in_words(found)


def _staleness_in_words(evidence: Evidence, cost: str) -> str:
    facts, found = evidence.facts, evidence.learning
    assert found is not None
    if learn.at_chance(facts, found):
        return _chance_in_words(evidence, cost)
    if found.at_equal_samples is not None and not learn.has_risen(facts, found):
        own, other = found.at_equal_samples
        text = f"the loss is {own:.3g} where the baseline's is {other:.3g} after as many samples"
        return text + _age_in_words(found)
    return _diverged_in_words(evidence, cost)


def _chance_in_words(evidence: Evidence, cost: str) -> str:
    found = evidence.learning
    assert found is not None
    text = f"the loss stays at {found.last:.3f}, which is guessing"
    text += f" (guessing gives {found.chance:.3f})"
    return text + _age_in_words(found) + _rate_in_words(found)


def _age_in_words(found: Learning) -> str:
    stale = found.staleness
    return f": gradients are {stale:.1f} updates old on average" if stale else ""


def _rate_in_words(found: Learning) -> str:
    rise = found.rate_rise
    if rise is None:
        return ""
    return (
        f"; the learning rate rose from {rise.before:.2g} to {rise.after:.2g} at step {rise.step}"
    )


def _flat_in_words(evidence: Evidence, cost: str) -> str:
    facts, found = evidence.facts, evidence.learning
    assert found is not None
    text = f"the loss stays at {found.last:.3g} over {len(facts.losses)} steps: "
    if weights.rate_is_zero(facts):
        return text + "the learning rate is 0 in all of them"
    cut = weights.untrained(facts)
    if cut is not None and cut.share >= weights.MOST:
        return f"{text}nothing is learnt, and {untrained_in_words(cut)}"
    if weights.do_not_move(facts):
        return text + "nothing is learnt, and the weights do not move"
    stuck = weights.stuck_tensors(facts)
    if stuck:
        more = f" and {len(stuck) - 1} other tensors" if len(stuck) > 1 else ""
        return f"{text}nothing is learnt, and {stuck[0]}{more} did not move"
    classes = learn.guess_near(found.last)
    if classes and learn.guess_near(found.first) == classes:
        return f"{text}it began there, and guessing among {classes} classes gives as much"
    return text + "nothing is learnt, or nothing is left to learn"


def untrained_in_words(cut: weights.Untrained) -> str:
    """Say which share of the weights is not trained, and why."""
    share, example = f"{cut.share:.0%} of the weights", f"({cut.example}, for one)"
    return {
        "frozen": f"{share} are frozen {example}",
        "without_gradient": f"no gradient comes to {share} {example}",
        "without_optimizer": f"{share} are in no optimizer {example}",
        "zero_gradient": f"the gradient of {share} is exactly zero {example}",
    }[cut.why]


def _odd_in_words(evidence: Evidence, cost: str) -> str:
    odd = samples.odd_worker(evidence.facts)
    assert odd is not None
    name, own, others = odd
    return f"the loss of {name} is {own:.3g} where no other worker's is above {others:.3g}"


def _sorted_in_words(evidence: Evidence, cost: str) -> str:
    found = samples.sorted_labels(evidence.facts)
    if found is not None:
        own, usual = found
        return (
            f"samples come sorted by class: a batch holds {own:.1f} classes on average, and "
            f"{usual:.1f} if they were shuffled"
        )
    jumps = samples.jumps(evidence.facts)
    shown = ", ".join(str(step) for step, _, _ in jumps[:3]) + (", …" if len(jumps) > 3 else "")
    _, before, after = max(jumps, key=lambda jump: jump[2])
    return (
        f"{len(jumps)} times (at step {shown}) a loss that had fallen is as large as at first "
        f"again, from {before:.2g} to {after:.2g}: so it is where samples come sorted by class"
    )


def _against_staleness(evidence: Evidence) -> Iterator[Action]:
    found, kind = evidence.learning, server_of(evidence)
    if found is None or found.staleness is None or kind is None:
        return
    stale, rate = found.staleness, _rate(evidence.facts)
    if kind.mode in ("async", "bounded") and not (kind.staleness_aware or kind.exclusive):
        aware = msgspec.structs.replace(kind, staleness_aware=True)
        text = "divide each update's rate by its age: staleness_aware=true (gradients are "
        text += f"{stale:.1f} updates old)"
        yield Action(text=text, change=architecture_of(aware))
    factor = 1 + max(stale, 1.0)
    to = f"to {rate / factor:.2g}" if rate else f"{factor:.2g} times"
    text = f"lower the learning rate {to}: gradients are {stale:.1f} updates "
    text += "old, and each counts as if it were fresh"
    yield Action(text=text, change=_with_rate(evidence.facts, rate / factor))
    sync = architecture_of(kind.changed(mode="sync"))
    yield Action(text="or let workers wait for each other: mode=sync", change=sync)


def _against_divergence(evidence: Evidence) -> Iterator[Action]:
    facts, found = evidence.facts, evidence.learning
    if found is not None and learn.has_sunk(facts, found):
        text = "look at the sign of the loss: training makes it small, not large"
        yield Action(text=text, effort="script")
        return
    yield from _against_staleness(evidence)
    if found is not None and found.staleness is not None and server_of(evidence) is not None:
        return
    rate = _rate(facts)
    if weights.reach(facts).get("uncleared"):
        yield _clear_gradients()
    elif found is not None and found.rate_rise is not None:
        yield _without_rise(evidence)
    elif found is not None and learn.has_forgotten(facts, found):
        least = f" to {min(rate / 10, 0.01):.2g}" if rate else ""
        text = "see whether the samples are shuffled: at an even rate a loss rises again where "
        text += f"others begin; else lower the learning rate{least}"
        yield Action(text=text, effort="script")
    else:
        yield _lower_rate(facts)


def _against_not_finite(evidence: Evidence) -> Iterator[Action]:
    facts, found = evidence.facts, evidence.learning
    began = learn.first_wrong(facts)
    if weights.reach(facts).get("uncleared"):
        yield _clear_gradients()
    elif found is not None and found.rate_rise is not None:
        yield _without_rise(evidence)
    elif began:
        text = f"look at the samples that {began} has then, and at what it computes from them"
        yield Action(text=text, effort="script")
    else:
        yield _lower_rate(facts)


def _against_flat(evidence: Evidence) -> Iterator[Action]:
    facts, rate = evidence.facts, _rate(evidence.facts)
    cut = weights.untrained(facts)
    if weights.rate_is_zero(facts):
        text = "give the optimizer a learning rate, and see what sets it to 0"
    elif weights.reach(facts).get("uncleared"):
        yield _clear_gradients()
        return
    elif cut is not None and cut.share >= weights.MOST:
        text = {
            "frozen": f"unfreeze what should learn: {cut.example} wants no gradient",
            "without_gradient": "see where the graph is cut on its way to "
            f"{cut.example}: detach(), no_grad(), .data",
            "without_optimizer": "give the optimizer all weights: model.parameters()",
            "zero_gradient": "see which activations are zero for every sample (dead ReLUs): give "
            "the layers before them other initial weights, or a lower learning rate",
        }[cut.why]
    elif weights.do_not_move(facts):
        text = "see what becomes of gradients before the optimizer's step: clipping, scaling, a "
        text += f"learning rate too small{f' ({rate:.2g})' if rate else ''}"
    else:
        text = "see that gradients reach the weights: nothing detached, nothing frozen; then "
        if weights.reach(facts):
            text = "look at whether labels belong to their samples, for gradients reach the "
            text += "weights; then "
        text += _other_rate(rate)
    yield Action(text=text, effort="script")


def _against_chance(evidence: Evidence) -> Iterator[Action]:
    if weights.reach(evidence.facts):
        text = "look at whether labels belong to their samples, for gradients reach the weights; "
        yield Action(text=f"{text}then {_other_rate(_rate(evidence.facts))}", effort="script")
        return
    text = f"{_other_rate(_rate(evidence.facts))}, and see whether one worker learns"
    yield Action(text=text)


def _other_rate(rate: float) -> str:
    return "try another learning rate" + (f" than {rate:.2g}" if rate else "")


def _clear_gradients() -> Action:
    text = "clear gradients in every step, optimizer.zero_grad(): those of the step before "
    return Action(text=f"{text}were still there when the next came", effort="script")


def _without_rise(evidence: Evidence) -> Action:
    rise = evidence.learning.rate_rise if evidence.learning else None
    assert rise is not None
    text = f"keep the learning rate at {rise.before:.2g}: from step {rise.step} on it is "
    text += f"{rise.after:.2g}"
    known = evidence.facts.experiment.workload.script is None
    constant: dict[str, object] = {"schedule": {"name": "constant"}}
    return Action(text=text, change=constant if known else {})


def _lower_rate(facts: Facts) -> Action:
    rate = _rate(facts)
    lower = min(rate / 10, 0.01)
    to = f"to {lower:.2g}" if rate else "ten times"
    text = f"lower the learning rate {to}, or limit the gradient's norm to 1"
    return Action(text=text, change=_with_rate(facts, lower))


def _rate(facts: Facts) -> float:
    """The learning rate in use at the end; 0 where a script's is not known."""
    used = [s.learning_rate for s in facts.typical.entries if s.learning_rate is not None]
    if used or facts.experiment.workload.script is not None:
        return used[-1] if used else 0.0
    return facts.experiment.workload.optimizer.learning_rate


def _with_rate(facts: Facts, rate: float) -> dict[str, object]:
    if facts.experiment.workload.script is not None:
        return {}
    return {"optimizer": {"learning_rate": rate}}


def _look_at_data(evidence: Evidence) -> list[Action]:
    odd = samples.odd_worker(evidence.facts)
    name = odd[0] if odd is not None else ""
    text = f"look at what {name} reads: its labels, and how its data is scaled"
    return [Action(text=text, effort="script")]


CAUSES = (
    CauseRule(
        name="not-finite",
        title="the loss, or a gradient, is not a number",
        proof="losses of steps, events",
        sentence=_not_finite_in_words,
        advice=_against_not_finite,
    ),
    CauseRule(
        name="diverged",
        title="the loss rises, rises again after it had fallen, or falls without an end",
        proof="losses of steps, learning rates; the sign of the loss",
        sentence=_diverged_in_words,
        advice=_against_divergence,
    ),
    CauseRule(
        name="staleness",
        title="gradients are too old for this learning rate ([below](#asynchronys-price))",
        proof="servers' count of staleness, losses",
        sentence=_staleness_in_words,
        advice=_against_staleness,
    ),
    CauseRule(
        name="chance",
        title="the loss is that of guessing",
        proof="losses, and the classes of the labels that were seen (or the number of classes)",
        sentence=_chance_in_words,
        advice=_against_chance,
    ),
    CauseRule(
        name="flat",
        title="the loss does not fall by what matters: nothing is learnt, or nothing is left to "
        "learn",
        proof="losses of the first and the last quarter, and their noise; which weights are "
        "frozen, are in no optimizer, or get no gradient or a zero one; how far they moved",
        sentence=_flat_in_words,
        advice=_against_flat,
    ),
    CauseRule(
        name="same-samples",
        title="all workers of a script train on the same samples",
        proof="their losses, equal in every step",
        sentence=lambda evidence, cost: (
            "all workers train on the same samples: their losses are equal in every step"
        ),
        advice=lambda evidence: [
            Action(
                text="pass the loader to paceline.shard, or give each worker's order another seed",
                effort="script",
            )
        ],
    ),
    CauseRule(
        name="sorted-samples",
        title="samples come one class after the other",
        proof="classes in a batch compared with those of all labels seen; or losses that are again "
        "and again as large as at first, at an even rate",
        sentence=_sorted_in_words,
        advice=lambda evidence: [
            Action(
                text="shuffle the samples, all of them and not a few at a time: shuffle=True, or "
                "a shuffle buffer as large as the data set",
                effort="script",
            )
        ],
    ),
    CauseRule(
        name="odd-worker",
        title="one worker's loss is far above all others', or has not fallen where theirs have",
        proof="each worker's losses",
        sentence=_odd_in_words,
        advice=_look_at_data,
    ),
)
