"""The cluster of an experiment as classes of alike hosts: 100,000 of them cost no more than one.

Nothing is expanded here: a class knows how many hosts it stands for.
"""

import math

import msgspec

from paceline import spec
from paceline.predict.stacks import Constants
from paceline.spec.hosts import written

DEFAULT_INSIDE = "memory"


class HostClass(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts with the same members, device and cable."""

    name: str
    hosts: int
    workers: int
    """On each of them."""

    servers: int
    link: spec.Link
    device: str
    slowdown: float = 1.0
    jitter_fraction: float = 0.0
    rack: str = ""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """All classes, and what joins devices in a host and racks to each other."""

    classes: tuple[HostClass, ...]
    inside: spec.Link
    uplink: spec.Link | None = None

    @property
    def workers(self) -> int:
        return sum(c.hosts * c.workers for c in self.classes)

    @property
    def computing(self) -> tuple[HostClass, ...]:
        """Classes with workers."""
        return tuple(c for c in self.classes if c.workers)

    @property
    def computing_hosts(self) -> int:
        return sum(c.hosts for c in self.computing)

    @property
    def racks(self) -> int:
        return len({c.rack for c in self.classes if c.rack})

    def network_rate(self, constants: Constants) -> float:
        """Payload bytes per second over the slowest cable that a ring of all workers crosses."""
        rates = [rate_of(c.link, constants) for c in self.computing]
        if self.uplink is not None and self.racks > 1:
            rates.append(rate_of(self.uplink, constants))
        return min(rates) * self.collisions(constants)

    def collisions(self, constants: Constants) -> float:
        """What is left of a fabric's rate when flows of many hosts meet in its switches."""
        hosts = sum(c.hosts for c in self.classes)
        return math.pow(1 - constants.collision_fraction, math.log2(max(1, hosts)))

    @property
    def latency_seconds(self) -> float:
        return max(c.link.latency_seconds for c in self.computing)


def rate_of(link: spec.Link, constants: Constants) -> float:
    """Bytes of payload per second."""
    return link.bandwidth_bits_per_second / 8 * constants.fraction(link.kind)


def topology_of(experiment: spec.Experiment) -> Topology:
    """The hosts as the experiment writes them; without any, every member has its own."""
    cluster = experiment.cluster
    classes = tuple(
        HostClass(
            name=f"hosts{index}",
            hosts=host.count,
            workers=host.workers,
            servers=host.servers,
            link=spec.parse_link(host.link, "[cluster]"),
            device=host.device,
            slowdown=host.slowdown,
            jitter_fraction=host.jitter_fraction,
            rack=host.rack,
        )
        for index, host in enumerate(written(experiment))
    )
    inside = spec.parse_link(cluster.inside or DEFAULT_INSIDE, "[cluster], inside")
    uplink = spec.parse_link(cluster.uplink, "[cluster], uplink") if cluster.uplink else None
    return Topology(classes=classes, inside=inside, uplink=uplink)
