"""What to do about a loss that does not fall: about the learning rate, mostly.

What such a change does to throughput is beside the point: these actions have no gain.
"""

from collections.abc import Iterator

import msgspec

from paceline.explain import learning as learn
from paceline.explain.causes import Evidence
from paceline.explain.exchanging import architecture_of, server_of
from paceline.explain.facts import Facts
from paceline.explain.findings import Action, CauseName, RateRise


def against_loss(evidence: Evidence, cause: CauseName) -> Iterator[Action]:
    """Cures of a loss."""
    rate = _rate(evidence.facts)
    rise = evidence.learning.rate_rise if evidence.learning else None
    began = learn.first_wrong(evidence.facts) if cause == "not-finite" else ""
    stale, kind = evidence.learning.staleness if evidence.learning else None, server_of(evidence)
    if stale is not None and kind is not None and cause != "not-finite":
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
        sync = kind.changed(mode="sync")
        yield Action(
            text="or let workers wait for each other: mode=sync", change=architecture_of(sync)
        )
    elif cause == "flat" and learn.rate_is_zero(evidence.facts):
        yield Action(text="give the optimizer a learning rate, and see who sets it to 0")
    elif cause == "diverged" and evidence.learning and learn.has_sunk(evidence.learning):
        text = "look at the sign of the loss: training makes it small, not large"
        yield Action(text=text)
    elif learn.reach(evidence.facts).get("uncleared"):
        text = "clear gradients in every step, optimizer.zero_grad(): those of the step before "
        yield Action(text=f"{text}were still there when the next came")
    elif cause == "flat" and sum(learn.not_reached(evidence.facts)[:2]) >= learn.MOST:
        frozen, lacking, name = learn.not_reached(evidence.facts)
        text = f"unfreeze what should learn: {name} wants no gradient"
        if lacking >= frozen:
            text = f"see where the graph is cut on its way to {name}: detach(), no_grad(), .data"
        yield Action(text=text)
    elif cause == "flat" and learn.do_not_move(evidence.facts):
        text = "see what becomes of gradients before the optimizer's step: clipping, scaling, a "
        yield Action(text=f"{text}learning rate too small{f' ({rate:.2g})' if rate else ''}")
    elif cause in ("chance", "flat"):
        other = "try another learning rate" + (f" than {rate:.2g}" if rate else "")
        text = "see that gradients reach the weights: nothing detached, nothing frozen; then "
        if learn.reach(evidence.facts):
            text = "look at whether labels belong to their samples, for gradients reach the "
            text += "weights; then "
        flat = cause == "flat"
        yield Action(text=text + other if flat else f"{other}, and see whether one worker learns")
    elif rise is not None:
        yield _without_rise(evidence.facts, rise)
    elif began:
        text = f"look at the samples that {began} has then, and at what it computes from them"
        yield Action(text=text)
    elif cause == "diverged" and _has_forgotten(evidence):
        least = f" to {min(rate / 10, 0.01):.2g}" if rate else ""
        text = "see whether the samples are shuffled: at an even rate a loss rises again where "
        yield Action(text=f"{text}others begin; else lower the learning rate{least}")
    else:
        lower = min(rate / 10, 0.01)
        to = f"to {lower:.2g}" if rate else "ten times"
        text = f"lower the learning rate {to}, or bound the gradient's norm at 1"
        yield Action(text=text, change=_with_rate(evidence.facts, lower))


def _has_forgotten(evidence: Evidence) -> bool:
    found = evidence.learning
    return found is not None and learn.has_forgotten(evidence.facts, found)


def _without_rise(facts: Facts, rise: RateRise) -> Action:
    text = f"keep the learning rate at {rise.before:.2g}: from step {rise.step} on it is "
    text += f"{rise.after:.2g}"
    known = facts.experiment.workload.script is None
    constant: dict[str, object] = {"schedule": {"name": "constant"}}
    return Action(text=text, change=constant if known else {})


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
