"""Which members stand on which host, with which cable and device: a cluster written out in full.

The tunnel builds these hosts, a worker finds its device here, the predictor models them. Without
`[[cluster.hosts]]` every member has a host of its own, named like it.
"""

from itertools import count, islice

from msgspec.structs import replace

from paceline.spec.base import Spec, require
from paceline.spec.cluster import Host, Link, parse_link
from paceline.spec.experiment import Experiment

DEFAULT_LINK = "1gbit"
"""Cable of emulated hosts when the experiment names none."""


class PlacedHost(Spec, frozen=True, kw_only=True):
    """One host, its members by name, its cable in numbers; nothing is dilated yet."""

    name: str
    members: tuple[str, ...]
    link: Link
    device: str
    slowdown: float
    jitter_fraction: float
    rack: str


def written(experiment: Experiment) -> tuple[Host, ...]:
    """The hosts as they are written, alike ones as one with a count, each with its cable and
    device; SpecError where their members are not the cluster's."""
    cluster, servers = experiment.cluster, experiment.num_servers
    own = [Host(count=cluster.workers)]
    own += [Host(count=servers, workers=0, servers=1)] if servers else []
    link, device = cluster.link or DEFAULT_LINK, cluster.device
    hosts = tuple(
        replace(host, link=host.link or link, device=host.device or device)
        for host in cluster.hosts or own
    )
    for what, wanted in {"workers": cluster.workers, "servers": servers}.items():
        held = sum(host.count * getattr(host, what) for host in hosts)
        problem = f"the hosts hold {held} {what}, and the cluster has {wanted}."
        fix = f"let the hosts' {what} add up to {wanted}."
        require(held == wanted, "[[cluster.hosts]]", problem, fix)
    return hosts


def one_by_one(experiment: Experiment) -> list[Host]:
    """Every host; members are dealt to them in order of number."""
    return [host for host in written(experiment) for _ in range(host.count)]


def place(experiment: Experiment) -> tuple[PlacedHost, ...]:
    """Every host of the experiment, with its members by name."""
    workers, servers = map("worker{}".format, count()), map("server{}".format, count())
    placed = []
    for index, host in enumerate(one_by_one(experiment)):
        members = (*islice(workers, host.workers), *islice(servers, host.servers))
        placed.append(
            PlacedHost(
                name=f"host{index}" if experiment.cluster.hosts else members[0],
                members=members,
                link=parse_link(host.link, "[cluster]"),
                device=host.device,
                slowdown=host.slowdown,
                jitter_fraction=host.jitter_fraction,
                rack=host.rack,
            )
        )
    return tuple(placed)


def host_of(experiment: Experiment, member: str) -> PlacedHost:
    """The host on which `member` stands."""
    return next(host for host in place(experiment) if member in host.members)
