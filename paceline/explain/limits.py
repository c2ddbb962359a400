"""How long a step needs each resource, and by how much it would be faster if that were.

The bottleneck is the resource whose relief helps most; the what-if of `needs` says which.
"""

from dataclasses import replace

import msgspec

from paceline import spec
from paceline.explain.facts import Facts
from paceline.explain.findings import Resource
from paceline.explain.needs import Needs, Wire, gain
from paceline.protocol import placement
from paceline.units import format_bandwidth, format_bytes, format_seconds

ALIKE = 0.8
"""Resources of one kind that are needed this share as long as another one are relieved with it."""

BUSY_FRACTION = 0.9
"""A core or a link used this much has nothing left to give."""


def resources(facts: Facts, needs: Needs) -> list[Resource]:
    """Every resource whose need per step is known, of every member, the longest first."""
    found = [
        *_workers(facts),
        *_links(facts, needs),
        *_uplinks(facts, needs),
        *_servers(needs),
    ]
    if needs.cpu and facts.experiment.engine in ("here", "tunnel"):
        counter = f"cpu_fraction of all members over {facts.cores} cores"
        found.append(
            Resource(
                name="cores of this machine",
                kind="cores",
                member="",
                seconds=needs.cpu,
                counter=counter,
            )
        )
    known = [
        msgspec.structs.replace(one, relief=gain(needs, relieved(needs, one)).middle)
        for one in found
        if one.seconds > 0
    ]
    return sorted(known, key=lambda one: (-round(one.relief, 2), -one.seconds))


def relieved(needs: Needs, resource: Resource) -> Needs:
    """What a step would need if a resource, and those of its kind needed as long, were faster."""

    def faster(wire: Wire) -> Wire:
        return {n: s / 2 if s >= ALIKE * resource.seconds else s for n, s in wire.items()}

    match resource.kind:
        case "link":
            return replace(needs, out=faster(needs.out), into=faster(needs.into))
        case "uplink":
            return replace(needs, uplinks=faster(needs.uplinks))
        case "server":
            return replace(needs, serving=faster(needs.serving))
        case "cores":
            return replace(needs, cpu=needs.cpu / 2)
    own = {n: s - min(s, resource.seconds) / 2 for n, s in needs.own.items()}
    if needs.together and resource.member:  # of the one that the others wait for, or of all alike
        slow = max(needs.own.values())
        own = {n: own[n] if needs.own[n] >= ALIKE * slow else s for n, s in needs.own.items()}
    return replace(needs, own=own)


def busy(facts: Facts, seconds: float) -> float:
    """Share of the time, steps and pauses, for which something was needed."""
    return min(1.0, seconds / (facts.typical.step_seconds + facts.typical.paused_seconds))


def closed_form_seconds(facts: Facts) -> float | None:
    """The least time of one exchange with these links; None where size or links are unknown."""
    size = gradient_bytes(facts)
    if size is None or not facts.links or not facts.exchanges:
        return None
    rates = {link.bandwidth_bits_per_second for link in facts.links.values()}
    if len(rates) > 1:  # the closed forms are for equal links
        return None
    return exchange_seconds(
        facts.architecture, facts.summary.workers, facts.summary.servers, size, rates.pop() / 8
    )


def exchange_seconds(
    kind: spec.Architecture, workers: int, servers: int, size_bytes: float, bytes_per_second: float
) -> float | None:
    """The closed form of an architecture; None where there is none."""
    served = kind.serves_workers
    if served is not None:
        return placement.exchange_seconds(
            served.placement, workers, max(servers, 1), size_bytes, bytes_per_second
        )
    if kind.is_all_reduce:
        return placement.ring_seconds(workers, size_bytes, bytes_per_second)
    return None


def gradient_bytes(facts: Facts) -> float | None:
    """Bytes of one worker's gradients: what all that serve hold together, or what a ring sent."""
    served = [m.counters["served_bytes"] for m in facts.members if "served_bytes" in m.counters]
    known = [size for size in served if isinstance(size, int | float)]
    if known:
        return float(sum(known))
    workers = facts.summary.workers
    sent = [facts.traffic[w.name].bytes_sent for w in facts.workers if w.name in facts.traffic]
    if facts.architecture.is_all_reduce and workers > 1 and sent and facts.links:
        return max(sent) * workers / (2 * (workers - 1))
    return None


def _workers(facts: Facts) -> list[Resource]:
    found = []
    for worker in facts.workers:
        parts = f"forward {format_seconds(worker.phases['forward'])}, "
        parts += f"backward {format_seconds(worker.phases['backward'])}"
        found += [
            Resource(
                name=f"compute of {worker.name}",
                kind="compute",
                member=worker.name,
                seconds=worker.compute_seconds,
                counter=f"{worker.name}: {parts}",
            ),
            Resource(
                name=f"input of {worker.name}",
                kind="input",
                member=worker.name,
                seconds=worker.phases["input"],
                counter=f"{worker.name}: input",
            ),
        ]
    return found


def _links(facts: Facts, needs: Needs) -> list[Resource]:
    found = []
    for name in needs.out:
        seconds = max(needs.out[name], needs.into[name])
        size = format_bytes(facts.traffic[name].busier_bytes)
        cable = format_bandwidth(facts.links[name].bandwidth_bits_per_second)
        counter = f"{name}: {size} per step in its busier direction, over {cable}"
        found.append(
            Resource(
                name=f"link of {name}", kind="link", member=name, seconds=seconds, counter=counter
            )
        )
    return found


def _uplinks(facts: Facts, needs: Needs) -> list[Resource]:
    if facts.uplink is None:
        return []
    rate = format_bandwidth(facts.uplink.bandwidth_bits_per_second)
    return [
        Resource(
            name=f"uplink of {rack}",
            kind="uplink",
            member="",
            seconds=seconds,
            counter=f"{rack}: bytes to and from other racks, over {rate}",
        )
        for rack, seconds in needs.uplinks.items()
    ]


def _servers(needs: Needs) -> list[Resource]:
    return [
        Resource(
            name=f"work of {name}",
            kind="server",
            member=name,
            seconds=seconds,
            counter=f"{name}: CPU time",
        )
        for name, seconds in needs.serving.items()
    ]
