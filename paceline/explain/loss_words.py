"""What is said of losses that do not fall."""

from paceline.explain import learning as learn
from paceline.explain import samples
from paceline.explain.causes import Evidence
from paceline.explain.findings import Learning


def loss_in_words(evidence: Evidence) -> str:
    facts, found = evidence.facts, evidence.learning
    wrong = learn.wrong_number(facts)
    if wrong:
        return f"{wrong}: nothing is learnt from there on"
    assert found is not None
    if found.not_finite_from is not None:
        text = f"the loss is not a number from step {found.not_finite_from} on: nothing is learnt"
        who = learn.first_wrong(facts)
        return text + (f"; it began on {who}" if who else "") + _rate_in_words(found)
    stale = found.staleness
    old = f": gradients are {stale:.1f} updates old on average" if stale else ""
    if learn.has_sunk(found):
        text = f"the loss falls without an end, from {found.first:.3g} to {found.last:.3g}"
        return f"{text}: its sign is wrong, or nothing bounds what it rewards"
    if learn.at_chance(facts, found):
        text = f"the loss stays at {found.last:.3f}, which is guessing"
        text += f" (ln of the classes: {found.chance:.3f})"
    elif learn.has_risen(facts, found):
        text = f"the loss rises from {found.first:.3g} to {found.last:.3g}"
    elif learn.has_forgotten(facts, found) and found.best is not None:
        text = f"the loss had fallen from {found.first:.3g} to {found.best[1]:.3g} by step "
        text += f"{found.best[0]}, and is {found.last:.3g} at the end"
    elif old and found.at_equal_samples is not None:
        own, other = found.at_equal_samples
        text = f"the loss is {own:.3g} where the baseline's is {other:.3g} after as many samples"
    else:
        step, worst = learn.worst(facts)
        text = f"the loss rose to {worst:.3g} at step {step}, from {found.first:.3g}"
    return text + old + _rate_in_words(found)


def _rate_in_words(found: Learning) -> str:
    rise = found.rate_rise
    if rise is None:
        return ""
    return (
        f"; the learning rate rose from {rise.before:.2g} to {rise.after:.2g} at step {rise.step}"
    )


def flat_in_words(evidence: Evidence) -> str:
    facts, found = evidence.facts, evidence.learning
    assert found is not None
    text = f"the loss stays at {found.last:.3g} over {len(facts.losses)} steps: "
    if learn.rate_is_zero(facts):
        return text + "the learning rate is 0 in all of them"
    frozen, lacking, name = learn.not_reached(facts)
    if frozen + lacking >= learn.MOST:
        return f"{text}nothing is learnt, and {unreached_in_words(frozen, lacking, name)}"
    if learn.do_not_move(facts):
        return text + "nothing is learnt, and the weights do not move"
    return text + "nothing is learnt, or nothing is left to learn"


def odd_in_words(evidence: Evidence) -> str:
    odd = samples.odd_worker(evidence.facts)
    assert odd is not None
    name, own, others = odd
    return f"the loss of {name} is {own:.3g} where no other worker's is above {others:.3g}"


def sorted_in_words(evidence: Evidence) -> str:
    jumps = samples.jumps(evidence.facts)
    shown = ", ".join(str(step) for step, _, _ in jumps[:3]) + (", …" if len(jumps) > 3 else "")
    _, before, after = max(jumps, key=lambda jump: jump[2])
    return (
        f"{len(jumps)} times (at step {shown}) a loss that had fallen is as large as at first "
        f"again, from {before:.2g} to {after:.2g}: so it is where samples come sorted by class"
    )


def unreached_in_words(frozen: float, lacking: float, name: str) -> str:
    if lacking >= frozen:
        return f"no gradient comes to {lacking:.0%} of the weights ({name}, for one)"
    return f"{frozen:.0%} of the weights are frozen ({name}, for one)"
