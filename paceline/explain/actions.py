"""What to do about what was found: changes to the experiment, each with what it would give.

Every gain comes from `needs.gain`, against the limit that would bind next. A change that would not
help is not offered, and the most promising comes first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import msgspec

from paceline import spec
from paceline.explain import samples
from paceline.explain.causes import (
    FEW_SAMPLES,
    FIXED_COMPUTE,
    FIXED_OF_FEW,
    Evidence,
    Inside,
    Loss,
    has_fewer_cores,
    slow_cable,
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
from paceline.explain.machine import is_full
from paceline.explain.needs import (
    Needs,
    gain,
    spared,
)
from paceline.explain.phases import OWN_PHASES
from paceline.explain.rates import against_loss
from paceline.explain.spans import Slowed
from paceline.explain.unsteady import Unsteady
from paceline.record.entries import TRACED

ONE_MAKES_FRACTION = 0.8
"""A worker that makes this much of all pauses makes them alone."""

UNEVEN_STAGES = 1.5
"""A pipeline's longest stage that takes this many times the shortest bounds it."""

OF_NETWORK: tuple[CauseName, ...] = ("slow-link", "slow-cable", "latency", "transport")

FREE_CORES = "end what else runs on these cores, or use others"
READ_AHEAD = (
    "prepare samples ahead of the step (a DataLoader's num_workers), or keep them (--cache)"
)


def actions(evidence: Evidence, causes: Sequence[Loss]) -> list[Action]:
    """What to do, the most promising first; what has no figure comes last.

    Before them all: about what is worse than time lost, where that comes first.
    """
    worse = list(takewhile(lambda cause: not cause.seconds, causes))
    found = [action for cause in causes for action in _against(evidence, cause.name)]
    before = [action for cause in worse for action in _against(evidence, cause.name)]
    unique = list({action.text: action for action in found}.values())
    worth = [a for a in unique if (a.gain is None or _worth(a.gain)) and a not in before]
    return before + sorted(worth, key=lambda a: -a.gain.middle if a.gain is not None else 0.0)


def _worth(promised: Gain) -> bool:
    return promised.low > 0 and promised.middle >= WORTH_GAIN


def _against(evidence: Evidence, cause: CauseName) -> Iterator[Action]:
    inside = [one for one in evidence.inside if one.loss.name == cause]
    if inside:
        yield from (_as_in_other_steps(evidence, one) for one in inside)
        return
    match cause:
        case "not-finite" | "diverged" | "staleness" | "chance" | "flat":
            yield from against_loss(evidence, cause)
        case "same-samples":
            text = "pass the loader to paceline.shard, or give each worker's order another seed"
            yield Action(text=text)
        case "sorted-samples":
            text = "shuffle the samples, all of them and not a few at a time: shuffle=True, or "
            yield Action(text=f"{text}a shuffle buffer as large as the data set")
        case "odd-worker":
            odd = samples.odd_worker(evidence.facts)
            name = odd[0] if odd is not None else ""
            yield Action(text=f"look at what {name} reads: its labels, and how its data is scaled")
        case "lost":
            yield Action(text="read what it said last: the run's folder has its log")
        case "memory":
            yield Action(text="use a smaller batch, fewer workers here, or hosts with more memory")
        case "cores" | "cpu-taken":
            yield from _against_shortage(evidence)
        case "readers":
            yield _cheaper_samples(evidence)
        case "pauses":
            yield from _against_pauses(evidence)
        case "first-steps":
            yield Action(text="train longer: the first steps are paid once")
        case "intermittent":
            yield from _against_unsteady(evidence)
        case "slowed":
            yield from (_as_before(evidence, slow) for slow in evidence.slowed)
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
            yield from _against_bubble(evidence)
        case "overhead":
            yield _leaner_script(evidence)
        case "compute":
            yield _as_in_baseline(evidence)


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
    if short.worker:  # the others have their cores
        relieved = replace(relieved, own={**needs.own, short.worker: relieved.own[short.worker]})
    promised = gain(replace(needs, cpu=0.0), replace(relieved, cpu=0.0))
    if short.name == "cpu-taken":
        yield Action(text=FREE_CORES, gain=promised)
        return
    threads = facts.experiment.cluster.threads or 1
    text = f"give the job {short.wanted} cores or a device per worker: it has {facts.cores}"
    yield Action(text=text, gain=promised)
    fitting = max(1, facts.cores // threads)
    if fitting < len(facts.workers):
        yield Action(text=f"or use {fitting} workers here: more only take cores from each other")


def _cheaper_samples(evidence: Evidence) -> Action:
    """Processes that prepare samples use the cores that computing needs."""
    facts, needs, short = evidence.facts, evidence.needs, evidence.shortage
    assert short is not None
    threads = facts.experiment.cluster.threads or 1
    spare = {}
    for worker in facts.workers:  # at best it waits for nothing but its own CPU time
        waits, used = worker.phases["input"], facts.traffic[worker.name].own_cpu_seconds or 0.0
        spare[worker.name] = max(short.seconds + waits, needs.own[worker.name] - used / threads)

    def without(share: float) -> Needs:
        own = {name: max(1e-6, s - share * spare[name]) for name, s in needs.own.items()}
        return replace(needs, own=own, chance=(1 - share) * needs.chance, cpu=0.0)

    now = replace(needs, cpu=0.0)
    promised = Gain(low=gain(now, without(0.5)).low, high=gain(now, without(1.0)).high)
    text = "prepare samples once and keep them, make them cheaper, or give them cores of their "
    text += "own: another number of reading processes only moves the wait"
    return Action(text=text, gain=promised)


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
        who = paused_by(facts, what)
        text = f"let the script make {named} ten times as rare"
        if who:
            text = f"let {who} make {named} ten times as rare, or beside training: all wait for it"
        yield Action(text=text, gain=gain(needs, rarer))


def _against_unsteady(evidence: Evidence) -> Iterator[Action]:
    found = evidence.unsteady
    assert found is not None
    places = {
        "input": "what its input waits for in those steps (a disk, a cache, a decoder)",
        "outside": "what the script does in those steps (logging, evaluation)",
        "exchange_exposed": "what else uses the network in those steps",
    }
    usual = "what else ran then, memory, or samples of uneven size"
    who = "every worker" if found.everybody else found.worker
    text = f"look at {places.get(found.phase, usual)} on {who}"
    yield Action(text=text, gain=_gain_without(found, evidence.needs))


def _as_before(evidence: Evidence, found: Slowed) -> Action:
    """Every step like those that were not slow."""
    text = _what_changed(found, "all workers" if found.everybody else found.worker)
    return Action(text=text, gain=_gain_without(found, evidence.needs))


def _gain_without(found: Unsteady | Slowed, needs: Needs) -> Gain:
    """If the phase never took longer than it mostly does."""
    if found.phase in ("exchange_exposed", "wait"):
        return spared(needs, 0.5 * found.seconds, found.seconds)
    slow = needs.own if found.everybody else [found.worker]
    own = {n: s - found.seconds if n in slow else s for n, s in needs.own.items()}
    return gain(needs, replace(needs, own=own, chance=max(0.0, needs.chance - found.seconds)))


def _as_in_other_steps(evidence: Evidence, inside: Inside) -> Action:
    """What was there for a part of the run is gone from that part."""
    found, cost = inside.slow, inside.loss.seconds * inside.steps_fraction
    late = inside.evidence.late
    who = "all workers"
    if inside.loss.name in ("slow-worker", "slow-cable") and late is not None:
        who = all_late(late)
    elif not found.everybody and found.phase in OWN_PHASES:
        who = found.worker
    if inside.loss.name in OF_NETWORK:
        cable = slow_cable(inside.evidence.facts, inside.evidence.needs)
        place = _what_changed(found, f"the network{f' of {cable}' if cable else ''}", "")
        text = f"{place}: another job, a cable that fell back to a lower rate"
    else:
        known = {"cpu-taken": FREE_CORES, "input": READ_AHEAD}
        text = known.get(inside.loss.name) or _what_changed(found, who)
    return Action(text=text, gain=spared(evidence.needs, 0.5 * cost, cost))


def _what_changed(
    found: Slowed, who: str, what: str = ": heat, memory, another job, longer samples"
) -> str:
    if found.grows:
        return f"look for what grows with every step of {who}: lists that are kept, heat, memory"
    place = f"at step {found.start if found.start is not None else found.end}"
    if found.start is not None and found.end is not None:
        place = f"between steps {found.start} and {found.end}"
    return f"look at what changed for {who} {place}{what}"


def _as_in_baseline(evidence: Evidence) -> Action:
    """Computing that takes longer for as many samples, on as many cores."""
    lost = sum(part.lost_seconds for part in evidence.parts if part.name == "compute")
    text = f"look at what {slower_phase(evidence)} does here that the baseline's does not: hooks, "
    text += "other layers, larger samples, another precision or layout"
    return Action(text=text, gain=spared(evidence.needs, 0.5 * lost, lost))


def slower_phase(evidence: Evidence) -> str:
    """The phase of computing that takes most longer than the baseline's."""
    facts, baseline = evidence.facts, evidence.baseline
    assert baseline is not None
    scale = facts.typical.samples / baseline.typical.samples
    own, other = facts.typical.phases, baseline.typical.phases
    return max(("forward", "backward", "update"), key=lambda p: own[p] - scale * other[p])


def _against_bubble(evidence: Evidence) -> Iterator[Action]:
    """Stages that are longer than the others bound a pipeline whatever else is done."""
    facts, needs, kind = evidence.facts, evidence.needs, evidence.facts.architecture.staging
    if kind is None:
        return
    stages, parts = facts.summary.workers // kind.replicas, kind.microbatches
    each = parts
    while each < 4 * stages and facts.typical.samples >= 2 * each * FEW_SAMPLES:
        each *= 2
    if each > parts:
        more = msgspec.structs.replace(kind, microbatches=each)
        text = f"try {each} parts of the batch in place of {parts}: microbatches={each}"
        # Smaller parts keep fewer workers waiting, and use a device less well.
        then = needs.pace + (sum(needs.own.values()) / kind.replicas - needs.pace) / each
        most = max(0.0, needs.step - then)
        gained = spared(needs, 0.3 * most, most)
        yield Action(text=text, gain=gained, change=architecture_of(more))
    elif parts < stages:
        yield Action(text="raise the batch, and cut it into more parts: microbatches")
    if each == parts or needs.pace > UNEVEN_STAGES * min(needs.own.values()):
        # All layers on each worker, for a part of the samples: nobody waits for a stage.
        even = sum(needs.own.values()) / len(needs.own)
        low, high = (needs.step - factor * even for factor in (1.4, 1.0))
        if low > 0:
            text = "let every worker train the whole model on its part of the batch, if it fits: "
            text += "ring, or server:placement=colocated"
            change = architecture_of(spec.Ring())
            yield Action(text=text, gain=spared(needs, low, high), change=change)


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
    full = facts.computes_here and is_full(facts)

    def without(share: float) -> Needs:
        own = {n: s - share * waits[n] for n, s in needs.own.items()}
        # What is prepared by others is still to be prepared, where cores are left for it.
        stays = 0.0 if full or not needs.cores else share * sum(waits.values()) / needs.cores
        return replace(needs, own=own, cpu=needs.cpu + stays)

    promised = Gain(low=gain(needs, without(0.5)).low, high=gain(needs, without(1.0)).high)
    text = "prepare samples once and keep them: no core is left to prepare them ahead"
    return Action(text=text if full else READ_AHEAD, gain=promised)


def _leaner_script(evidence: Evidence) -> Action:
    facts, needs = evidence.facts, evidence.needs
    outside = {worker.name: worker.overhead_seconds for worker in facts.workers}
    most = replace(needs, own={n: s - outside[n] for n, s in needs.own.items()})
    half = replace(needs, own={n: s - outside[n] / 2 for n, s in needs.own.items()})
    promised = Gain(low=gain(needs, half).low, high=gain(needs, most).high)
    text = "look at what the script does between the optimizer's step and the next batch"
    if traced_anew(facts):
        text = "call the tf.function with tensors of one shape, and no Python numbers"
    return Action(text=text, gain=promised)


def traced_anew(facts: Facts) -> str:
    """What TensorFlow's side told of a step that is compiled again and again; empty for nothing."""
    return next((event.text for event in facts.events if event.kind == TRACED), "")


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


def paused_by(facts: Facts, what: str) -> str:
    """The one worker that makes pauses of a kind while the others wait; empty for all, and for
    checkpoints, which one worker writes for all."""
    if what not in ("script", "evaluation"):
        return ""
    made = {worker.name: worker.own_pauses.get(what, 0.0) for worker in facts.workers}
    most = max(made, key=lambda name: made[name])
    alone = len(made) > 1 and made[most] > ONE_MAKES_FRACTION * sum(made.values())
    return most if alone else ""


def _all_own(needs: Needs, seconds: float) -> Needs:
    return replace(needs, own={n: max(1e-6, s + seconds) for n, s in needs.own.items()})


def _without_slowdown(facts: Facts, workers: Sequence[str]) -> dict[str, object]:
    """The experiment's hosts with these workers' like the others, where they are written out."""
    return with_hosts(facts, workers, {"slowdown": 1.0, "jitter_fraction": 0.0, "device": ""})
