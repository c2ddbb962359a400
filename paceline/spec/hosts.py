"""Which members stand on which host, with which cable and device: a cluster written out in full.

The tunnel builds these hosts, a worker finds its device here, the predictor models them. Without
`[[cluster.hosts]]` every member has a host of its own, named like it.
"""

from paceline.errors import SpecError
from paceline.spec.base import Spec
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


def place(experiment: Experiment) -> tuple[PlacedHost, ...]:
    """Every host of the experiment; workers and servers are dealt in order of number."""
    cluster = experiment.cluster
    workers = [f"worker{rank}" for rank in range(cluster.workers)]
    servers = [f"server{rank}" for rank in range(experiment.num_servers)]
    if not cluster.hosts:
        return tuple(_placed(name, (name,), Host(), experiment) for name in (*workers, *servers))
    alike = [host for host in cluster.hosts for _ in range(host.count)]
    _check(sum(host.workers for host in alike), len(workers), "workers")
    _check(sum(host.servers for host in alike), len(servers), "servers")
    placed = []
    for index, host in enumerate(alike):
        members = (*workers[: host.workers], *servers[: host.servers])
        workers, servers = workers[host.workers :], servers[host.servers :]
        placed.append(_placed(f"host{index}", members, host, experiment))
    return tuple(placed)


def host_of(experiment: Experiment, member: str) -> PlacedHost:
    """The host on which `member` stands."""
    return next(host for host in place(experiment) if member in host.members)


def _placed(name: str, members: tuple[str, ...], host: Host, experiment: Experiment) -> PlacedHost:
    cluster = experiment.cluster
    link = parse_link(host.link or cluster.link or DEFAULT_LINK, "[cluster]")
    return PlacedHost(
        name=name,
        members=members,
        link=link,
        device=host.device or cluster.device,
        slowdown=host.slowdown,
        jitter_fraction=host.jitter_fraction,
        rack=host.rack,
    )


def _check(on_hosts: int, wanted: int, what: str) -> None:
    if on_hosts != wanted:
        problem = f"the hosts hold {on_hosts} {what}, and the cluster has {wanted}."
        fix = f"let the hosts' {what} add up to {wanted}."
        raise SpecError("[[cluster.hosts]]", problem, fix)
