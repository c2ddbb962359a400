"""How long a step needs each resource; the longest binds, and no step is shorter than it."""

from paceline import spec
from paceline.explain.facts import Facts, own_seconds
from paceline.explain.findings import Resource
from paceline.protocol import placement
from paceline.units import format_bandwidth, format_bytes

BUSY_FRACTION = 0.9
"""A core or a link used this much has nothing left to give."""


def resources(facts: Facts) -> list[Resource]:
    """Every resource whose need per step is known, the longest first."""
    slowest = max(facts.workers, key=own_seconds)
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
    for role in ("worker", "server"):
        found += [*_links(facts, role)[:1], *_cores(facts, role)]
    return sorted((r for r in found if r.seconds > 0), key=lambda r: -r.seconds)


def link_seconds(facts: Facts, role: str) -> tuple[str, float] | None:
    """The member of a role whose link is needed longest, and how long; None when not known."""
    timed = [
        (8 * facts.traffic[m.name].busier_bytes / rate(facts, m.name), m.name)
        for m in facts.members
        if m.role == role and m.name in facts.traffic and m.name in facts.links
    ]
    if not timed:
        return None
    seconds, name = max(timed)
    return name, seconds


def rate(facts: Facts, member: str) -> float:
    """Bits per second of a member's cable as it was in the run: dilation slows it."""
    return facts.links[member].bandwidth_bits_per_second


def closed_form_seconds(facts: Facts) -> float | None:
    """The least time of one exchange with these links; None where size or links are unknown."""
    size, kind = gradient_bytes(facts), facts.architecture
    if size is None or not facts.links or not facts.exchanges:
        return None
    slowest = min(link.bandwidth_bits_per_second for link in facts.links.values()) / 8
    workers, servers = facts.summary.workers, facts.summary.servers
    if isinstance(kind, spec.Server):
        return placement.exchange_seconds(kind.placement, workers, servers, size, slowest)
    if isinstance(kind, spec.Ring):
        return placement.ring_seconds(workers, size, slowest)
    return None


def gradient_bytes(facts: Facts) -> float | None:
    """Bytes of one worker's gradients, as it counted them."""
    for member in facts.members:
        size = member.counters.get("gradient_bytes")
        if isinstance(size, int | float):
            return float(size)
    return None


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


def _cores(facts: Facts, role: str) -> list[Resource]:
    """A server's one busy thread; workers' CPU time is their compute and is counted there."""
    if role != "server":
        return []
    used = [
        (facts.traffic[m.name].cpu_seconds or 0.0, m.name)
        for m in facts.servers
        if m.name in facts.traffic
    ]
    if not used:
        return []
    seconds, name = max(used)
    counter = f"{name}: cpu_fraction {seconds / facts.typical.step_seconds:.2f}"
    return [Resource(name=f"CPU of {name}", seconds=seconds, counter=counter)]
