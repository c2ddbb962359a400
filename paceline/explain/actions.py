"""What to do about what was found: changes to the experiment, each with what it would give.

Every gain comes from `needs.gain`, against the limit that would bind next. A change that would not
help is not offered, and the most promising comes first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from paceline import spec
from paceline.explain.causes import (
    Evidence,
    Loss,
    has_fewer_cores,
)
from paceline.explain.exchanging import (
    WORTH_GAIN,
    against_bytes,
    architecture_of,
    better_cable,
    faster_links,
    fewer_rounds,
    larger_pieces,
    more_servers,
    nearer,
    no_compression,
    server_of,
    shared_update,
    through_memory,
    with_hosts,
)
from paceline.explain.facts import Facts, own_seconds
from paceline.explain.findings import Action, CauseName, Gain, Late
from paceline.explain.needs import (
    Needs,
    gain,
    spared,
)

FIXED_COMPUTE, FIXED_OF_FEW = 0.4, 0.8
"""Share of forward and backward that may not grow with the batch, on real cores: small matrices
use them badly, those of a few samples hardly at all."""

FEW_SAMPLES = 8
"""Fewer fill no core's registers."""


def actions(evidence: Evidence, causes: Sequence[Loss]) -> list[Action]:
    """What to do, the most promising first; what has no figure comes last."""
    found = [action for cause in causes for action in _against(evidence, cause.name)]
    unique = list({action.text: action for action in found}.values())
    worth = [a for a in unique if a.gain is None or _worth(a.gain)]
    return sorted(worth, key=lambda a: -a.gain.middle if a.gain is not None else 0.0)


def _worth(promised: Gain) -> bool:
    return promised.low > 0 and promised.middle >= WORTH_GAIN


def _against(evidence: Evidence, cause: CauseName) -> Iterator[Action]:
    match cause:
        case "not-finite" | "diverged" | "staleness" | "chance":
            yield from _against_rate(evidence, cause)
        case "lost":
            yield Action(text="read what it said last: the run's folder has its log")
        case "memory":
            yield Action(text="use a smaller batch, fewer workers here, or hosts with more memory")
        case "cores" | "cpu-taken":
            yield from _against_shortage(evidence)
        case "pauses":
            yield from _against_pauses(evidence)
        case "first-steps":
            yield Action(text="train longer: the first steps are paid once")
        case "intermittent":
            yield from _against_unsteady(evidence)
        case "slowed":
            yield _as_before(evidence)
        case "slow-worker" | "jitter":
            yield from _against_wait(evidence)
        case "slow-cable":
            yield from better_cable(evidence)
        case "slow-link":
            yield from against_bytes(evidence)
            yield faster_links(evidence)
            yield _larger_batch(evidence, 2)
        case "latency":
            yield from nearer(evidence)
            yield from fewer_rounds(evidence)
            yield _larger_batch(evidence, 2)
        case "server":
            yield from more_servers(evidence)
        case "compression":
            yield no_compression(evidence)
        case "transport":
            yield from larger_pieces(evidence)
            yield from through_memory(evidence)
            yield _larger_batch(evidence, 2)
        case "input":
            yield _ready_input(evidence)
        case "small-batch":
            yield _larger_batch(evidence, 2)
            yield _larger_batch(evidence, 4)
            yield from shared_update(evidence)
        case "late-work":
            yield from _larger_quorum(evidence)
        case "bubble":
            yield from _more_microbatches(evidence)
        case "overhead":
            yield _leaner_script(evidence)


def _against_rate(evidence: Evidence, cause: CauseName) -> Iterator[Action]:
    """Cures of a loss; what they do to throughput is beside the point."""
    rate = _rate(evidence.facts)
    stale, kind = evidence.learning.staleness if evidence.learning else None, server_of(evidence)
    if stale is not None and kind is not None and cause != "not-finite":
        if kind.mode in ("async", "bounded") and not kind.staleness_aware:
            aware = msgspec.structs.replace(kind, staleness_aware=True)
            text = "divide each update's rate by its age: staleness_aware=true (gradients are "
            text += f"{stale:.1f} updates old)"
            yield Action(text=text, change=architecture_of(aware))
        factor = 1 + max(stale, 1.0)
        to = f"to {rate / factor:.2g}" if rate else f"{factor:.2g} times"
        text = f"lower the learning rate {to}: gradients are {stale:.1f} updates "
        text += "old, and each counts as if it were fresh"
        yield Action(text=text, change=_with_rate(evidence.facts, rate / factor))
        sync = msgspec.structs.replace(kind, mode="sync", staleness_aware=False)
        yield Action(
            text="or let workers wait for each other: mode=sync", change=architecture_of(sync)
        )
    elif cause == "chance":
        yield Action(text="try another learning rate, and see whether one worker learns")
    else:
        lower = min(rate / 10, 0.01)
        to = f"to {lower:.2g}" if rate else "ten times"
        text = f"lower the learning rate {to}, or bound the gradient's norm at 1"
        yield Action(text=text, change=_with_rate(evidence.facts, lower))


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


def _against_shortage(evidence: Evidence) -> Iterator[Action]:
    facts, short, needs = evidence.facts, evidence.shortage, evidence.needs
    if has_fewer_cores(evidence):
        lost = sum(part.lost_seconds for part in evidence.parts if part.name == "compute")
        alone = replace(_all_own(needs, -max(0.0, lost)), cpu=0.0)
        text = "give each worker a host or a device of its own: one worker alone has all "
        text += f"{facts.cores} cores of this one"
        yield Action(text=text, gain=gain(replace(needs, cpu=0.0), alone))
    if short is None:
        return
    relieved = _all_own(needs, -short.seconds)
    promised = gain(replace(needs, cpu=0.0), replace(relieved, cpu=0.0))
    if short.name == "cpu-taken":
        yield Action(text="end what else runs on these cores, or use others", gain=promised)
        return
    threads = facts.experiment.cluster.threads or 1
    text = f"give the job {short.wanted} cores or a device per worker: it has {facts.cores}"
    yield Action(text=text, gain=promised)
    fitting = max(1, facts.cores // threads)
    if fitting < len(facts.workers):
        yield Action(text=f"or use {fitting} workers here: more only take cores from each other")


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
        yield Action(text=f"let the script make {named} ten times as rare", gain=gain(needs, rarer))


def _against_unsteady(evidence: Evidence) -> Iterator[Action]:
    found, needs = evidence.unsteady, evidence.needs
    assert found is not None
    places = {
        "input": "what its input waits for in those steps (a disk, a cache, a decoder)",
        "outside": "what the script does in those steps (logging, evaluation)",
        "exchange_exposed": "what else uses the network in those steps",
    }
    usual = "what else ran then, memory, or samples of uneven size"
    who = "every worker" if found.everybody else found.worker
    text = f"look at {places.get(found.phase, usual)} on {who}"
    if found.phase in ("exchange_exposed", "wait"):
        yield Action(text=text, gain=spared(needs, 0.5 * found.seconds, found.seconds))
        return
    slow = needs.own if found.everybody else [found.worker]
    own = {n: s - found.seconds if n in slow else s for n, s in needs.own.items()}
    steady = replace(needs, own=own, chance=max(0.0, needs.chance - found.seconds))
    yield Action(text=text, gain=gain(needs, steady))


def _as_before(evidence: Evidence) -> Action:
    """Every step like those before it became slow."""
    found, needs = evidence.slowed, evidence.needs
    assert found is not None
    who = "all workers" if found.everybody else found.worker
    text = f"look at what changed for {who} at step {found.step}: heat, memory, another job, "
    text += "longer samples"
    if found.phase in ("exchange_exposed", "wait"):
        return Action(text=text, gain=spared(needs, 0.5 * found.seconds, found.seconds))
    slow = needs.own if found.everybody else [found.worker]
    own = {n: s - found.seconds if n in slow else s for n, s in needs.own.items()}
    steady = replace(needs, own=own, chance=max(0.0, needs.chance - found.seconds))
    return Action(text=text, gain=gain(needs, steady))


def _more_microbatches(evidence: Evidence) -> Iterator[Action]:
    """No figure: smaller parts keep fewer workers waiting, and use a device less well."""
    facts, kind = evidence.facts, evidence.facts.architecture
    if not isinstance(kind, spec.Pipeline):
        return
    stages, each = facts.summary.workers // kind.replicas, kind.microbatches
    while each < 4 * stages and facts.typical.samples >= 2 * each * FEW_SAMPLES:
        each *= 2
    if each > kind.microbatches:
        more = msgspec.structs.replace(kind, microbatches=each)
        text = f"try {each} parts of the batch in place of {kind.microbatches}: microbatches={each}"
        yield Action(text=text, change=architecture_of(more))
    else:
        yield Action(text="raise the batch, and cut it into more parts: microbatches")


def _larger_quorum(evidence: Evidence) -> Iterator[Action]:
    """No figure: throughput counts what is computed, used or not."""
    kind, workers = server_of(evidence), evidence.facts.summary.workers
    if kind is not None and workers > 2:
        more = msgspec.structs.replace(kind, quorum=workers - 1)
        text = f"let {workers - 1} of {workers} workers make a step: quorum={workers - 1}"
        yield Action(text=text, change=architecture_of(more))
    yield Action(text="or let every gradient count: mode=bounded")


def all_late(late: Late) -> str:
    """Who is late, by name as long as they are few."""
    if len(late.alike) > 2:
        return f"{late.worker} and {len(late.alike)} others"
    return " and ".join(sorted((late.worker, *late.alike)))


def _against_wait(evidence: Evidence) -> Iterator[Action]:
    facts, needs, late = evidence.facts, evidence.needs, evidence.late
    if late is None:
        yield Action(text="let no step wait for all: server:mode=quorum or bounded")
        return
    typical = own_seconds(facts.typical)
    even = replace(needs, own={n: min(s, typical) for n, s in needs.own.items()})
    if late.reason != "share":
        text = f"bring {late.reason} of {all_late(late)} to the others' pace"
        if late.reason == "overhead":
            text = f"look at what {all_late(late)} does between optimizer.step() and the next "
            text += "batch: logging, checkpoints, a slow disk"
        change = _without_slowdown(facts, (late.worker, *late.alike))
        yield Action(text=text, gain=gain(needs, even), change=change)
    if late.reason in ("compute", "share"):
        yield from _shares(evidence)


def _shares(evidence: Evidence) -> Iterator[Action]:
    """Samples dealt so that all workers are ready together."""
    facts, needs = evidence.facts, evidence.needs
    grows = {w.name: w.phases["forward"] + w.phases["backward"] for w in facts.workers}
    if not all(grows.values()) or not facts.together:
        return
    rates = {w.name: w.samples / grows[w.name] for w in facts.workers}
    seconds = sum(w.samples for w in facts.workers) / sum(rates.values())
    own = {name: needs.own[name] - grows[name] + seconds for name in needs.own}
    mean = sum(rates.values()) / len(rates)
    shares = [round(rate / mean, 2) for rate in rates.values()]
    late = evidence.late
    even = late is not None and late.reason == "share"
    text = f"{'' if even else 'or '}deal each batch by speed: shares = {shares}"
    yield Action(text=text, gain=gain(needs, replace(needs, own=own)), change={"shares": shares})


def _ready_input(evidence: Evidence) -> Action:
    facts, needs = evidence.facts, evidence.needs
    waits = {worker.name: worker.phases["input"] for worker in facts.workers}
    most = replace(needs, own={n: s - waits[n] for n, s in needs.own.items()})
    half = replace(needs, own={n: s - waits[n] / 2 for n, s in needs.own.items()})
    promised = Gain(low=gain(needs, half).low, high=gain(needs, most).high)
    text = "prepare samples ahead of the step: more reading threads, or a cached data set"
    return Action(text=text, gain=promised)


def _leaner_script(evidence: Evidence) -> Action:
    facts, needs = evidence.facts, evidence.needs
    outside = {worker.name: worker.overhead_seconds for worker in facts.workers}
    most = replace(needs, own={n: s - outside[n] for n, s in needs.own.items()})
    half = replace(needs, own={n: s - outside[n] / 2 for n, s in needs.own.items()})
    promised = Gain(low=gain(needs, half).low, high=gain(needs, most).high)
    text = "look at what the script does between the optimizer's step and the next batch"
    return Action(text=text, gain=promised)


def _larger_batch(evidence: Evidence, factor: int) -> Action:
    """Each step does `factor` times the samples for the same fixed cost."""
    facts, needs = evidence.facts, evidence.needs
    grows = {w.name: w.phases["forward"] + w.phases["backward"] for w in facts.workers}
    inputs = {w.name: w.phases["input"] for w in facts.workers}

    def with_fixed(fixed: float) -> Gain:
        more = factor - 1
        own = {n: s + more * ((1 - fixed) * grows[n] + inputs[n]) for n, s in needs.own.items()}
        return gain(needs, replace(needs, own=own), factor)

    fixed = FIXED_COMPUTE if facts.typical.samples >= FEW_SAMPLES else FIXED_OF_FEW
    high = with_fixed(fixed if facts.computes_here else 0.05).high
    workload, workers = facts.experiment.workload, facts.summary.workers
    own_batch = facts.typical.samples  # a script's batch is its own; the experiment knows none
    if workload.script is None:
        own_batch = workload.global_batch_for(workers) / workers
    each = round(own_batch * factor)
    text = f"raise the batch to {each} a worker, where the optimizer allows it"
    sizes: dict[str, object] = {} if workload.script else {"batch": each, "global_batch": 0}
    return Action(text=text, gain=Gain(low=with_fixed(0.0).low, high=high), change=sizes)


def pauses(facts: Facts) -> dict[str, float]:
    """Seconds per step of the typical worker's pauses, by kind."""
    found: dict[str, float] = {}
    for step in facts.typical.entries:
        for what, seconds in step.paused_seconds.items():
            found[what] = found.get(what, 0.0) + seconds / facts.typical.steps
    return found


def _all_own(needs: Needs, seconds: float) -> Needs:
    return replace(needs, own={n: max(1e-6, s + seconds) for n, s in needs.own.items()})


def _without_slowdown(facts: Facts, workers: Sequence[str]) -> dict[str, object]:
    """The experiment's hosts with these workers' like the others, where they are written out."""
    return with_hosts(facts, workers, {"slowdown": 1.0, "jitter_fraction": 0.0, "device": ""})
