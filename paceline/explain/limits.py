"""How long a step needs each resource; the longest binds, and no step is shorter than it."""

from paceline import spec
from paceline.explain.facts import Facts
from paceline.explain.findings import Resource
from paceline.protocol import placement
from paceline.units import format_bandwidth, format_bytes

BUSY_FRACTION = 0.9
"""A core or a link used this much has nothing left to give."""


def resources(facts: Facts) -> list[Resource]:
    """Every resource whose need per step is known, the longest first."""
    slowest = facts.pacemaker
    found = [
        Resource(
            name=f"compute of {slowest.name}",
            seconds=slowest.compute_seconds,
            counter=f"{slowest.name}: forward + backward + update",
        ),
        Resource(
            name=f"input of {slowest.name}",
            seconds=slowest.phases["input"],
            counter=f"{slowest.name}: input",
        ),
    ]
    found += [*_links(facts, "worker"), *_links(facts, "server")]
    serving = serving_seconds(facts)
    if serving is not None:
        name, seconds, counter = serving
        found.append(Resource(name=f"work of {name}", seconds=seconds, counter=counter))
    return sorted((r for r in found if r.seconds > 0), key=lambda r: -r.seconds)


def link_seconds(facts: Facts, role: str) -> tuple[str, float] | None:
    """The member of a role whose link is needed longest, and how long; None when not known."""
    timed = [
        (_wire_seconds(facts, m.name), m.name)
        for m in facts.members
        if m.role == role and m.name in facts.traffic and m.name in facts.links
    ]
    if not timed:
        return None
    seconds, name = max(timed)
    return name, seconds


def closed_form_seconds(facts: Facts) -> float | None:
    """The least time of one exchange with these links; None where size or links are unknown."""
    size, kind = gradient_bytes(facts), facts.architecture
    if size is None or not facts.links or not facts.exchanges:
        return None
    rates = {link.bandwidth_bits_per_second for link in facts.links.values()}
    if len(rates) > 1:  # the closed forms are for equal links
        return None
    bytes_per_second = rates.pop() / 8
    workers, servers = facts.summary.workers, facts.summary.servers
    if isinstance(kind, spec.Server):
        return placement.exchange_seconds(kind.placement, workers, servers, size, bytes_per_second)
    if isinstance(kind, spec.Ring):
        return placement.ring_seconds(workers, size, bytes_per_second)
    return None


def gradient_bytes(facts: Facts) -> float | None:
    """Bytes of one worker's gradients: what all that serve hold together."""
    served = [m.counters["served_bytes"] for m in facts.members if "served_bytes" in m.counters]
    known = [size for size in served if isinstance(size, int | float)]
    return float(sum(known)) if known else None


def serving_seconds(facts: Facts) -> tuple[str, float, str] | None:
    """The dedicated server that works longest per step, how long, and the counter that says so."""
    found = []
    for member in facts.servers:
        traffic = facts.traffic.get(member.name)
        if traffic is not None and traffic.serving_seconds is not None:
            found.append((traffic.serving_seconds, member.name, "busy_seconds"))
        elif traffic is not None and traffic.cpu_seconds is not None:
            found.append((traffic.cpu_seconds, member.name, "cpu_fraction"))
    if not found:
        return None
    seconds, name, counter = max(found)
    share = seconds / facts.typical.step_seconds
    return name, seconds, f"{name}: {counter}, {share:.0%} of the time"


def _wire_seconds(facts: Facts, member: str) -> float:
    bits = 8 * facts.traffic[member].busier_bytes
    return bits / facts.links[member].bandwidth_bits_per_second


def busy_cores(facts: Facts) -> float | None:
    """Cores in use over all members of a run on one machine; None when not counted."""
    used = [facts.traffic[m.name].cpu_seconds for m in facts.members if m.name in facts.traffic]
    known = [seconds for seconds in used if seconds is not None]
    if not known or len(known) < len(facts.members):
        return None
    return sum(known) / facts.typical.step_seconds


def _links(facts: Facts, role: str) -> list[Resource]:
    found = link_seconds(facts, role)
    if found is None:
        return []
    name, seconds = found
    size = format_bytes(facts.traffic[name].busier_bytes)
    cable = format_bandwidth(facts.links[name].bandwidth_bits_per_second)
    counter = f"{name}: {size} per step in its busier direction, over {cable}"
    return [Resource(name=f"link of {name}", seconds=seconds, counter=counter)]
