"""What to do about an exchange that takes too long: cables, placements, servers, pieces, codecs.

Changes to the experiment, each with what it would give (`needs.gain`), as in `actions`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from paceline import spec
from paceline.explain import limits
from paceline.explain.causes import (
    Evidence,
    compression_seconds,
    far_away,
    slow_cable,
    small_pieces,
)
from paceline.explain.facts import Facts
from paceline.explain.findings import Action
from paceline.explain.needs import (
    Needs,
    gain,
    scaled_links,
    served_overlap,
    spared,
    step_range,
)
from paceline.units import format_bandwidth, format_bytes, format_seconds

WORTH_GAIN = 0.05
"""Less is not worth the change."""

SHARED_MEMORY_FACTOR = 4.0
"""How much faster gradients move through memory than through loopback sockets, at best."""


def better_cable(evidence: Evidence) -> Iterator[Action]:
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
    if server_of(evidence) is not None:  # what waited for one server may hide behind computing now
        better = replace(better, overlap=served_overlap(facts))
    text = f"replace the cable of {name}, or mend its port: the others have "
    text += format_bandwidth(usual)
    yield Action(text=text, gain=gain(needs, better), change=_without_cable(facts, name))


def against_bytes(evidence: Evidence) -> Iterator[Action]:
    """Fewer bytes over the busiest link: another placement, or compressed gradients."""
    yield from _other_placements(evidence)
    yield from _rarer_averages(evidence)
    kind, needs = server_of(evidence), evidence.needs
    if kind is None or kind.compression != "none":
        return
    # Gradients are compressed and weights are not: what a dedicated server's worker receives stays
    # as it is; where workers serve, a quarter of both directions goes.
    if kind.placement == "dedicated":
        workers = {name for name in needs.out if not name.startswith("server")}
        less = replace(
            needs,
            out={n: s / 2 if n in workers else s for n, s in needs.out.items()},
            into={n: s if n in workers else s / 2 for n, s in needs.into.items()},
        )
    else:
        less = scaled_links(needs, 0.75)
    half = kind.changed(compression="bf16")
    text = "send gradients in half the bytes: compression=bf16"
    yield Action(text=text, gain=gain(needs, less), change=architecture_of(half))


def faster_links(evidence: Evidence) -> Action:
    facts, needs = evidence.facts, evidence.needs
    rate = max((link.bandwidth_bits_per_second for link in facts.links.values()), default=1e9)
    text = f"use links of {format_bandwidth(10 * rate)}"
    promised = gain(needs, scaled_links(needs, 0.1)) if needs.out else None
    change: dict[str, object] = {"link": f"{10 * rate / 1e6:g}mbit"}
    tunnel = facts.experiment.engine == "tunnel" and not facts.experiment.cluster.hosts
    return Action(text=text, gain=promised, change=change if tunnel else {})


def _other_placements(evidence: Evidence) -> Iterator[Action]:
    """Placements and numbers of servers whose closed form is shorter."""
    facts, needs, kind = evidence.facts, evidence.needs, server_of(evidence)
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
            change = {**architecture_of(other), "servers": count}
            yield Action(text=text, gain=promised, change=change)


def more_servers(evidence: Evidence) -> Iterator[Action]:
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


def nearer(evidence: Evidence) -> Iterator[Action]:
    """One cable with a delay that the others do not have."""
    name = far_away(evidence.facts)
    if not name:
        return
    delays = {n: link.latency_seconds for n, link in evidence.facts.links.items()}
    left = median(delays.values()) / delays[name]
    cost = next(part.seconds for part in evidence.parts if part.name == "exchange: latency")
    text = f"look at the cable of {name}, or use a host that is nearer: its delay is "
    text += f"{format_seconds(delays[name])}, the others' "
    text += format_seconds(median(delays.values())) if left else "next to nothing"
    promised = spared(evidence.needs, 0.5 * (1 - left) * cost, (1 - left) * cost)
    yield Action(text=text, gain=promised, change=_without_cable(evidence.facts, name))


def _rarer_averages(evidence: Evidence) -> Iterator[Action]:
    facts, needs = evidence.facts, evidence.needs
    kind = facts.architecture.averaging
    if kind is not None:
        rarer = msgspec.structs.replace(kind, every=8 * kind.every)
        text = f"average every {rarer.every} steps in place of {kind.every}: it trains differently"
        promised = gain(needs, _with_exchange(needs, 1 / 8))
        yield Action(text=text, gain=promised, change=architecture_of(rarer))


def larger_pieces(evidence: Evidence) -> Iterator[Action]:
    """Pieces so small that each one's own cost is what an exchange takes."""
    kind, needs = evidence.facts.architecture, evidence.needs
    size = small_pieces(kind)
    if size is None:
        return
    option = kind.piece_option
    whole = kind.changed(**{option: "auto"})
    text = f"exchange larger pieces than {format_bytes(size)}: leave {option} out"
    promised = spared(needs, 0.3 * needs.exposed, needs.exposed)
    yield Action(text=text, gain=promised, change=architecture_of(whole))


def shared_update(evidence: Evidence) -> Iterator[Action]:
    """Every worker of a ring updates all weights; workers that serve update their part alone."""
    facts, needs = evidence.facts, evidence.needs
    update, workers = facts.typical.phases["update"], facts.summary.workers
    if not facts.architecture.is_all_reduce or workers < 2 or not facts.computes_here:
        return
    spare = (1 - 1 / workers) * update
    text = "let each worker update a part of the weights: server:placement=colocated, for "
    text += "optimizers that work element by element"
    change = architecture_of(spec.Server(placement="colocated"))
    yield Action(text=text, gain=spared(needs, 0.5 * spare, spare), change=change)


def fewer_rounds(evidence: Evidence) -> Iterator[Action]:
    """Two messages one after the other in place of the ring's 2(n-1)."""
    facts, needs = evidence.facts, evidence.needs
    if facts.architecture.is_all_reduce and facts.summary.workers > 2:
        factor = 1 / (facts.summary.workers - 1)
        fewer = replace(needs, latency=needs.latency * factor)
        text = "exchange in two messages in place of a ring's "
        text += f"{2 * (facts.summary.workers - 1)}: server:placement=colocated"
        change = architecture_of(spec.Server(placement="colocated"))
        yield Action(text=text, gain=gain(needs, fewer), change=change)
    if facts.architecture.averaging is None:
        text = "exchange less often: average:every=8 trains differently, and compare says how much"
        yield Action(text=text)


def no_compression(evidence: Evidence) -> Action:
    facts, needs, kind = evidence.facts, evidence.needs, server_of(evidence)
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
    change = architecture_of(kind.changed(compression="none")) if kind else {}
    return Action(text="leave compression out", gain=promised, change=change)


def through_memory(evidence: Evidence) -> Iterator[Action]:
    """On one host, gradients need not pass through sockets."""
    facts, needs = evidence.facts, evidence.needs
    advised = spec.Server(placement="colocated")
    if facts.shares_memory or not facts.would_share_memory(advised) or facts.summary.workers < 2:
        return
    if not facts.architecture.is_all_reduce and server_of(evidence) is None:
        return
    most = (1 - 0.1 / SHARED_MEMORY_FACTOR) * needs.exposed
    promised = spared(needs, 0.4 * needs.exposed, most)
    change = {**architecture_of(advised), "servers": 0}
    text = "move gradients through shared memory: server:placement=colocated"
    yield Action(text=text, gain=promised, change=change)


def _with_bytes(
    facts: Facts, wire: dict[str, float], role: str, added_bytes: float
) -> dict[str, float]:
    """The links of all members of a role with so many more bytes a step, shared evenly."""
    own = [name for name in wire if name.startswith("server") == (role == "server")]
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


def server_of(evidence: Evidence) -> spec.Server | None:
    return evidence.facts.architecture.serves_workers


def architecture_of(architecture: spec.Architecture) -> dict[str, object]:
    return {"architecture": spec.format_architecture(architecture)}


def _counter(facts: Facts, name: str) -> float:
    values = [member.counters.get(name) for member in facts.members]
    return float(sum(value for value in values if isinstance(value, int | float)))


def with_hosts(
    facts: Facts, members: Sequence[str], fields: dict[str, object]
) -> dict[str, object]:
    hosts = facts.experiment.cluster.hosts
    alike = [msgspec.structs.replace(h, count=1) for h in hosts for _ in range(h.count)]
    workers = servers = 0
    for index, host in enumerate(alike):
        names = [f"worker{workers + n}" for n in range(host.workers)]
        names += [f"server{servers + n}" for n in range(host.servers)]
        workers, servers = workers + host.workers, servers + host.servers
        if set(members) & set(names):
            alike[index] = msgspec.structs.replace(host, **fields)
    return {"hosts": [msgspec.to_builtins(one) for one in alike]} if alike else {}


def _without_cable(facts: Facts, member: str) -> dict[str, object]:
    return with_hosts(facts, [member], {"link": ""})
