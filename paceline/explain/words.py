"""Findings in sentences: causes, actions, and the one sentence that ends a run."""

from collections.abc import Sequence

from paceline import spec
from paceline.explain import limits
from paceline.explain.causes import Loss
from paceline.explain.facts import Facts
from paceline.explain.findings import Action, Late
from paceline.units import format_bandwidth, format_seconds

REASONS = {"input": "input", "compute": "compute", "link": "exchange", "overhead": "bookkeeping"}


def cause_text(facts: Facts, loss: Loss, late: Late | None, baseline: Facts | None) -> str:
    """One sentence without its full stop: what costs how much, and what is behind it."""
    step = facts.typical.step_seconds
    cost = f"{format_seconds(loss.seconds)} of each {format_seconds(step)} step"
    cost += f" ({loss.seconds / step:.0%})"
    if loss.name == "slow-worker" and late is not None:
        return f"waiting for {late.worker} takes {cost}: {_why_late(late)}"
    if loss.name == "slow-link" and late is not None and late.reason == "link":
        return f"waiting for {late.worker} takes {cost}: {_why_late(late)}"
    return {
        "slow-link": f"the link is too slow for this exchange, which takes {cost}{_cable(facts)}",
        "latency": f"the delay of the links takes {cost}",
        "server": f"queueing at {_busiest_server(facts)} takes {cost}",
        "transport": f"moving gradients between processes takes {cost}{_cores(facts)}",
        "jitter": f"waiting for whoever is last takes {cost}; no worker is slower than the rest",
        "input": f"the input is too slow: workers wait for samples {cost}",
        "small-batch": f"the batch of {facts.typical.samples:g} a worker is too small: what a step "
        f"costs with any batch takes {cost}",
        "compute": f"computing takes {cost} longer than in the baseline{_cores(facts)}",
        "overhead": f"time outside all phases takes {cost}",
        "slow-worker": f"waiting for the slowest worker takes {cost}",
    }[loss.name]


def actions(facts: Facts, losses: Sequence[Loss], late: Late | None) -> list[Action]:
    """What to do about each loss, with the gain where the record is enough to compute it."""
    found = []
    for loss in losses:
        if loss.name in ("slow-worker", "jitter"):
            found += _against_wait(facts, loss, late)
        elif loss.name == "slow-link":
            found += _against_bytes(facts, loss)
        elif loss.name == "server":
            found.append(_more_servers(facts, loss))
        elif loss.name == "input":
            text = "prepare samples ahead of the step: more reading threads, or a cached data set"
            found.append(Action(text=text, gain_fraction=gain(facts, loss.seconds)))
        elif loss.name in ("small-batch", "transport", "latency", "overhead"):
            found.append(_larger_batch(facts, 4))
        elif loss.name == "compute":
            text = "give every worker cores or a device of its own"
            found.append(Action(text=text, gain_fraction=gain(facts, loss.seconds)))
    unique = {action.text: action for action in found}
    return list(unique.values())


def verdict_text(
    facts: Facts, causes: Sequence[str], best: Action | None, baseline: Facts | None
) -> str:
    """The sentence that ends a run."""
    typical = facts.typical
    scaled = ""
    if baseline is not None:
        speedup = facts.samples_per_second / baseline.samples_per_second
        share = speedup * len(baseline.workers) / len(facts.workers)
        scaled = f"{speedup:.2f} times the baseline's throughput ({share:.0%} of ideal); "
    if not causes:
        share = typical.compute_seconds / typical.step_seconds
        return (
            f"Healthy: {scaled}compute is {share:.0%} of each "
            f"{format_seconds(typical.step_seconds)} step{_full(facts)}."
        )
    text = f"{scaled}{causes[0]}" if scaled else causes[0]
    sentence = text[0].upper() + text[1:]
    if best is not None and best.gain_fraction is not None:
        sentence += f"; {best.text}: up to {best.gain_fraction:+.0%}"
    return f"{sentence}."


def gain(facts: Facts, seconds: float) -> float:
    """By how much throughput rises when each step is shorter by `seconds`."""
    step = facts.typical.step_seconds
    return step / max(step - seconds, 1e-9) - 1


def _why_late(late: Late) -> str:
    what, by = REASONS[late.reason], format_seconds(late.seconds)
    if late.factor is None:
        return f"its {what} makes it {by} late"
    return f"its {what} takes {late.factor:.1f} times the typical worker's and makes it {by} late"


def _against_wait(facts: Facts, loss: Loss, late: Late | None) -> list[Action]:
    faster = gain(facts, loss.seconds)
    if late is None:
        text = "let no step wait for all: server:mode=quorum or bounded"
        return [Action(text=text)]
    what = REASONS[late.reason]
    found = [Action(text=f"bring {late.worker}'s {what} to the others' pace", gain_fraction=faster)]
    if late.reason == "compute":
        text = f"or give {late.worker} a smaller share of each batch ([cluster] shares)"
        found.append(Action(text=text, gain_fraction=_even_out(facts)))
    return found


def _even_out(facts: Facts) -> float | None:
    """Throughput when samples are shared so that all workers are ready together."""
    times = [worker.compute_seconds + worker.phases["input"] for worker in facts.workers]
    rates = [w.samples / seconds for w, seconds in zip(facts.workers, times, strict=True)]
    together = sum(worker.samples for worker in facts.workers) / sum(rates)
    return gain(facts, max(times) - together)


def _against_bytes(facts: Facts, loss: Loss) -> list[Action]:
    kind, found = facts.architecture, []
    if isinstance(kind, spec.Server) and kind.compression == "none":
        text = "halve the bytes with compression=bf16"
        found.append(Action(text=text, gain_fraction=gain(facts, loss.seconds / 2)))
    return [*found, _larger_batch(facts, 2)]


def _more_servers(facts: Facts, loss: Loss) -> Action:
    count = max(1, len(facts.servers))
    servers = limits.link_seconds(facts, "server")
    spared = loss.seconds / 2 if servers is None else min(loss.seconds, servers[1] / 2)
    text = f"use {2 * count} servers in place of {count}, or placement=colocated"
    return Action(text=text, gain_fraction=gain(facts, spared))


def _larger_batch(facts: Facts, factor: int) -> Action:
    """Each step does `factor` times the samples for the same fixed cost."""
    typical = facts.typical
    grows = typical.phases["forward"] + typical.phases["backward"] + typical.phases["input"]
    longer = typical.step_seconds + (factor - 1) * grows
    samples = round(typical.samples * factor)
    text = f"raise the batch to {samples} a worker, where the optimizer allows it"
    return Action(text=text, gain_fraction=factor * typical.step_seconds / longer - 1)


def _cable(facts: Facts) -> str:
    found = limits.link_seconds(facts, "worker")
    if found is None:
        return ""
    name, seconds = found
    cable = format_bandwidth(facts.links[name].bandwidth_bits_per_second)
    return f": {name}'s {cable} link is busy {seconds / facts.typical.step_seconds:.0%} of the time"


def _busiest_server(facts: Facts) -> str:
    link, serving = limits.link_seconds(facts, "server"), limits.serving_seconds(facts)
    busy = [(found[1], found[0]) for found in (link, serving) if found is not None]
    return max(busy)[1] if busy else "the servers"


def _full(facts: Facts) -> str:
    busy = _busy(facts)
    return f", and the {facts.cores} cores are full" if busy else ""


def _cores(facts: Facts) -> str:
    return f"; all {facts.cores} cores are busy" if _busy(facts) else ""


def _busy(facts: Facts) -> bool:
    if facts.experiment.engine != "here" or not facts.cores:
        return False
    used = limits.busy_cores(facts)
    return used is not None and used >= limits.BUSY_FRACTION * facts.cores
