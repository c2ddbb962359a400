"""What to do about what was found: changes to the experiment, each with what it would give.

Every gain comes from `needs.gain`, against the limit that would bind next. A change that would not
help is not offered, and the most promising comes first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from paceline import spec
from paceline.explain import limits
from paceline.explain.causes import Evidence, Loss, compression_seconds, slow_cable
from paceline.explain.facts import Facts, own_seconds
from paceline.explain.findings import Action, CauseName, Gain
from paceline.explain.needs import (
    Needs,
    gain,
    scaled_links,
    served_overlap,
    spared,
    step_range,
)
from paceline.units import format_bandwidth

WORTH_GAIN = 0.05
"""Less is not worth the change."""

FIXED_COMPUTE = 0.4
"""Share of forward and backward that may not grow with the batch, on real cores: small matrices
use them badly."""

SHARED_MEMORY_FACTOR = 4.0
"""How much faster gradients move through memory than through loopback sockets, at best."""


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
        case "slow-worker" | "jitter":
            yield from _against_wait(evidence)
        case "slow-cable":
            yield from _better_cable(evidence)
        case "slow-link":
            yield from _against_bytes(evidence)
            yield _faster_links(evidence)
            yield _larger_batch(evidence, 2)
        case "latency":
            yield from _fewer_rounds(evidence)
            yield _larger_batch(evidence, 2)
        case "server":
            yield from _more_servers(evidence)
        case "compression":
            yield _no_compression(evidence)
        case "transport":
            yield from _through_memory(evidence)
            yield _larger_batch(evidence, 2)
        case "input":
            yield _ready_input(evidence)
        case "small-batch":
            yield _larger_batch(evidence, 2)
            yield _larger_batch(evidence, 4)
        case "overhead":
            yield _leaner_script(evidence)


def _against_rate(evidence: Evidence, cause: CauseName) -> Iterator[Action]:
    """Cures of a loss; what they do to throughput is beside the point."""
    rate = _rate(evidence.facts)
    stale, kind = evidence.learning.staleness if evidence.learning else None, _server(evidence)
    if stale is not None and kind is not None and cause != "not-finite":
        if kind.mode in ("async", "bounded") and not kind.staleness_aware:
            aware = msgspec.structs.replace(kind, staleness_aware=True)
            text = "divide each update's rate by its age: staleness_aware=true (gradients are "
            text += f"{stale:.1f} updates old)"
            yield Action(text=text, change=_kind(aware))
        factor = 1 + max(stale, 1.0)
        to = f"to {rate / factor:.2g}" if rate else f"{factor:.2g} times"
        text = f"lower the learning rate {to}: gradients are {stale:.1f} updates "
        text += "old, and each counts as if it were fresh"
        yield Action(text=text, change=_with_rate(evidence.facts, rate / factor))
        sync = msgspec.structs.replace(kind, mode="sync", staleness_aware=False)
        yield Action(text="or let workers wait for each other: mode=sync", change=_kind(sync))
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
    text = f"look at {places.get(found.phase, usual)} on {found.worker}"
    if found.phase in ("exchange_exposed", "wait"):
        yield Action(text=text, gain=spared(needs, 0.5 * found.seconds, found.seconds))
        return
    own = dict(needs.own)
    own[found.worker] -= found.seconds
    steady = replace(needs, own=own, chance=max(0.0, needs.chance - found.seconds))
    yield Action(text=text, gain=gain(needs, steady))


def _against_wait(evidence: Evidence) -> Iterator[Action]:
    facts, needs, late = evidence.facts, evidence.needs, evidence.late
    if late is None:
        yield Action(text="let no step wait for all: server:mode=quorum or bounded")
        return
    typical = own_seconds(facts.typical)
    even = replace(needs, own={n: min(s, typical) for n, s in needs.own.items()})
    words = {"input": "input", "compute": "compute", "link": "exchange", "overhead": "bookkeeping"}
    what = words[late.reason]
    text = f"bring {late.worker}'s {what} to the others' pace"
    yield Action(text=text, gain=gain(needs, even), change=_without_slowdown(facts, late.worker))
    if late.reason == "compute":
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
    text = f"or deal each batch by speed: shares = {shares}"
    yield Action(text=text, gain=gain(needs, replace(needs, own=own)), change={"shares": shares})


def _better_cable(evidence: Evidence) -> Iterator[Action]:
    facts, needs = evidence.facts, evidence.needs
    name = slow_cable(facts, needs)
    if not name:
        return
    usual = median(link.bandwidth_bits_per_second for link in facts.links.values())
    ratio = facts.links[name].bandwidth_bits_per_second / usual
    better = replace(
        needs,
        out={**needs.out, name: needs.out[name] * ratio},
        into={**needs.into, name: needs.into[name] * ratio},
    )
    if _server(evidence) is not None:  # what waited for one server may hide behind computing now
        better = replace(better, overlap=served_overlap(facts))
    text = f"replace the cable of {name}, or mend its port: the others have "
    text += format_bandwidth(usual)
    yield Action(text=text, gain=gain(needs, better), change=_without_cable(facts, name))


def _against_bytes(evidence: Evidence) -> Iterator[Action]:
    """Fewer bytes over the busiest link: another placement, or compressed gradients."""
    yield from _other_placements(evidence)
    kind, needs = _server(evidence), evidence.needs
    if kind is None or kind.compression != "none":
        return
    # Gradients are compressed and weights are not: what a dedicated server's worker receives stays
    # as it is; where workers serve, a quarter of both directions goes.
    if kind.placement == "dedicated":
        workers = {name for name in needs.out if name.startswith("worker")}
        less = replace(
            needs,
            out={n: s / 2 if n in workers else s for n, s in needs.out.items()},
            into={n: s if n in workers else s / 2 for n, s in needs.into.items()},
        )
    else:
        less = scaled_links(needs, 0.75)
    half = msgspec.structs.replace(kind, compression="bf16")
    text = "send gradients in half the bytes: compression=bf16"
    yield Action(text=text, gain=gain(needs, less), change=_kind(half))


def _faster_links(evidence: Evidence) -> Action:
    facts, needs = evidence.facts, evidence.needs
    rate = max((link.bandwidth_bits_per_second for link in facts.links.values()), default=1e9)
    text = f"use links of {format_bandwidth(10 * rate)}"
    promised = gain(needs, scaled_links(needs, 0.1)) if needs.out else None
    change: dict[str, object] = {"link": f"{10 * rate / 1e6:g}mbit"}
    tunnel = facts.experiment.engine == "tunnel" and not facts.experiment.cluster.hosts
    return Action(text=text, gain=promised, change=change if tunnel else {})


def _other_placements(evidence: Evidence) -> Iterator[Action]:
    """Placements and numbers of servers whose closed form is shorter."""
    facts, needs, kind = evidence.facts, evidence.needs, _server(evidence)
    now, size = limits.closed_form_seconds(facts), limits.gradient_bytes(facts)
    if now is None or size is None or not now:
        return
    workers, servers = facts.summary.workers, facts.summary.servers
    rate = next(iter(facts.links.values())).bandwidth_bits_per_second / 8
    base = kind or spec.Server()
    options: list[tuple[spec.Server, int, str]] = []
    if kind is None or kind.placement != "colocated":
        shared = msgspec.structs.replace(base, placement="colocated")
        text = "let every worker serve a part: server:placement=colocated"
        options.append((shared, 0, text))
    if kind is None or (kind.placement == "colocated" and servers < workers):
        apart = msgspec.structs.replace(base, placement="dedicated")
        text = f"add {workers} servers on hosts of their own: server with --servers {workers}"
        options.append((apart, workers, text))
    for other, count, text in options:
        then = limits.exchange_seconds(other, workers, count, size, rate)
        if then is not None and then < now:
            served = replace(_with_exchange(needs, then / now), overlap=served_overlap(facts))
            promised = gain(needs, served)
            change = {**_kind(other), "servers": count}
            yield Action(text=text, gain=promised, change=change)


def _more_servers(evidence: Evidence) -> Iterator[Action]:
    """Servers share what one carries; the workers' own links are the next limit."""
    facts, needs = evidence.facts, evidence.needs
    count = max(1, len(facts.servers))
    before = 0.0
    for factor in (2, 4):
        served = replace(_served(needs, factor), overlap=served_overlap(facts))
        promised = gain(needs, served)
        # Twice the servers for what noise would give are no advice.
        if factor * count <= 2 * facts.summary.workers and promised.middle > before + WORTH_GAIN:
            before = promised.middle
            text = f"use {factor * count} servers in place of {count}"
            yield Action(text=text, gain=promised, change={"servers": factor * count})
    yield from _other_placements(evidence)


def _fewer_rounds(evidence: Evidence) -> Iterator[Action]:
    """Two messages one after the other in place of the ring's 2(n-1)."""
    facts, needs = evidence.facts, evidence.needs
    if isinstance(facts.architecture, spec.Ring) and facts.summary.workers > 2:
        factor = 1 / (facts.summary.workers - 1)
        fewer = replace(needs, latency=needs.latency * factor)
        text = "exchange in two messages in place of a ring's "
        text += f"{2 * (facts.summary.workers - 1)}: server:placement=colocated"
        change = _kind(spec.Server(placement="colocated"))
        yield Action(text=text, gain=gain(needs, fewer), change=change)
    if not isinstance(facts.architecture, spec.Average):
        text = "exchange less often: average:every=8 trains differently, and compare says how much"
        yield Action(text=text)


def _no_compression(evidence: Evidence) -> Action:
    facts, needs, kind = evidence.facts, evidence.needs, _server(evidence)
    raw = _counter(facts, "compression_raw_bytes")
    encoded = _counter(facts, "compression_encoded_bytes")
    steps = facts.typical.steps + facts.experiment.measurement.warmup_steps
    added_bytes = max(0.0, raw - encoded) / steps  # gradients grow back; weights never shrank
    plain = replace(
        needs,
        out=_with_bytes(facts, needs.out, "worker", added_bytes),
        into=_with_bytes(facts, needs.into, "server", added_bytes),
    )
    low, high = step_range(needs, plain)
    encoding, step = min(compression_seconds(facts), needs.exposed), needs.step + needs.paused
    promised = spared(needs, step - high + encoding / 2, step - low + encoding)
    change = _kind(msgspec.structs.replace(kind, compression="none")) if kind else {}
    return Action(text="leave compression out", gain=promised, change=change)


def _through_memory(evidence: Evidence) -> Iterator[Action]:
    """On one host, gradients need not pass through sockets."""
    facts, needs = evidence.facts, evidence.needs
    one_host = facts.experiment.engine == "here" and len(facts.hosts) == 1
    if not one_host or facts.shares_memory or facts.summary.workers < 2:
        return
    if not isinstance(facts.architecture, spec.Ring | spec.Server):
        return
    most = (1 - 0.1 / SHARED_MEMORY_FACTOR) * needs.exposed
    promised = spared(needs, 0.4 * needs.exposed, most)
    change = {**_kind(spec.Server(placement="colocated")), "servers": 0}
    text = "move gradients through shared memory: server:placement=colocated"
    yield Action(text=text, gain=promised, change=change)


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

    high = with_fixed(FIXED_COMPUTE if facts.computes_here else 0.05).high
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


def _with_bytes(
    facts: Facts, wire: dict[str, float], role: str, added_bytes: float
) -> dict[str, float]:
    """The links of all members of a role with so many more bytes a step, shared evenly."""
    own = [name for name in wire if name.startswith(role)]
    rates = {name: facts.links[name].bandwidth_bits_per_second / 8 for name in own}
    more = {name: wire[name] + added_bytes / len(own) / rates[name] for name in own}
    return {**wire, **more}


def _served(needs: Needs, factor: int) -> Needs:
    """`factor` times as many servers: each carries that much less."""

    def shared(wire: dict[str, float]) -> dict[str, float]:
        return {n: s / factor if n.startswith("server") else s for n, s in wire.items()}

    out, into = shared(needs.out), shared(needs.into)
    return replace(needs, out=out, into=into, serving=shared(needs.serving))


def _with_exchange(needs: Needs, factor: float) -> Needs:
    """The busiest link or server, and all others with it, needed `factor` times as long."""
    servers = {name: factor * seconds for name, seconds in needs.serving.items()}
    return replace(scaled_links(needs, factor), serving=servers)


def _all_own(needs: Needs, seconds: float) -> Needs:
    return replace(needs, own={n: max(1e-6, s + seconds) for n, s in needs.own.items()})


def _server(evidence: Evidence) -> spec.Server | None:
    kind = evidence.facts.architecture
    return kind if isinstance(kind, spec.Server) else None


def _kind(architecture: spec.Architecture) -> dict[str, object]:
    return {"architecture": spec.format_architecture(architecture)}


def _counter(facts: Facts, name: str) -> float:
    values = [member.counters.get(name) for member in facts.members]
    return float(sum(value for value in values if isinstance(value, int | float)))


def _without_slowdown(facts: Facts, worker: str) -> dict[str, object]:
    """The experiment's hosts with this worker's like the others, where they are written out."""
    return _with_host(facts, worker, {"slowdown": 1.0, "jitter_fraction": 0.0, "device": ""})


def _without_cable(facts: Facts, member: str) -> dict[str, object]:
    return _with_host(facts, member, {"link": ""})


def _with_host(facts: Facts, member: str, fields: dict[str, object]) -> dict[str, object]:
    hosts = facts.experiment.cluster.hosts
    alike = [msgspec.structs.replace(h, count=1) for h in hosts for _ in range(h.count)]
    workers = servers = 0
    for index, host in enumerate(alike):
        names = [f"worker{workers + n}" for n in range(host.workers)]
        names += [f"server{servers + n}" for n in range(host.servers)]
        workers, servers = workers + host.workers, servers + host.servers
        if member in names:
            alike[index] = msgspec.structs.replace(host, **fields)
            return {"hosts": [msgspec.to_builtins(one) for one in alike]}
    return {}
