"""Hosts and seats of a cluster with servers, collapsed: a *cell* is a set of hosts that are alike.

A small cluster has one cell per host and nothing is collapsed. In a large one, hosts that carry a
hot seat keep a cell of their own and all others share a few: one where everybody moves in step,
some where workers drift apart.
"""

import math
from collections.abc import Sequence

import msgspec

from paceline import protocol, spec
from paceline.predict.topology import HostClass, Topology
from paceline.protocol.plan import Shape, placement_of

EXACT_MEMBERS = 12
"""Up to so many members every one is simulated by itself."""

PHASES = 10
"""Into so many parts workers that do not wait for each other are divided; with fewer, they come to
a busy server in crowds that a real cluster does not have."""


class HostCell(msgspec.Struct, frozen=True, kw_only=True):
    """Some hosts of one class."""

    name: str
    of: HostClass
    hosts: int
    phases: int
    """The workers of a host fall into so many groups that are not in step."""

    seats: tuple[int, ...] = ()
    """Numbers of the seats that stand on these hosts."""

    @property
    def group_workers(self) -> float:
        """Workers per host in each of its groups."""
        return self.of.workers / self.phases


def lay_out(
    experiment: spec.Experiment, topology: Topology, leaders: bool
) -> tuple[list[list[int]], list[float]]:
    """The seats on each host of each class, host by host, and every seat's share.

    `leaders`: only one worker of each host exchanges.
    """
    serving, servers = experiment.architecture.serving, experiment.num_servers
    assert serving is not None
    workers = topology.computing_hosts if leaders else topology.workers
    placement = placement_of(serving, Shape(workers=workers, servers=servers))
    inside, apart = protocol.placement.shares(placement, workers, servers)
    shares: list[float] = []
    on_hosts: list[list[int]] = []
    for of in topology.classes:
        own = (1 if of.workers else 0) if leaders else of.workers
        for _ in range(of.hosts):
            added = [inside] * own + [apart] * of.servers
            kept = [share for share in added if share > 0]
            on_hosts.append(list(range(len(shares), len(shares) + len(kept))))
            shares += kept
    return on_hosts, shares


def cells_of(
    topology: Topology,
    on_hosts: Sequence[Sequence[int]],
    hot: Sequence[int],
    *,
    phases: int,
) -> list[HostCell]:
    """Cells over all classes. `phases`: 1 where workers wait for one another in each step."""
    members = topology.workers + sum(len(seats) for seats in on_hosts)
    exact = members <= EXACT_MEMBERS
    cells: list[HostCell] = []
    first = 0
    for of in topology.classes:
        seats_of = on_hosts[first : first + of.hosts]
        first += of.hosts
        alone = [i for i, seats in enumerate(seats_of) if exact or set(seats) & set(hot)]
        rest = [i for i in range(of.hosts) if i not in set(alone)]
        parts = [[i] for i in alone] + _parts(rest, of, seats_of, phases)
        for part in parts:
            in_host = min(of.workers, phases) if of.workers else 1
            cells.append(
                HostCell(
                    name=f"{of.name}.{len(cells)}",
                    of=of,
                    hosts=len(part),
                    phases=of.workers if exact and of.workers else in_host,
                    seats=tuple(seat for i in part for seat in seats_of[i]),
                )
            )
    return cells


def _parts(
    rest: list[int], of: HostClass, seats_of: Sequence[Sequence[int]], phases: int
) -> list[list[int]]:
    """Hosts with and without seats apart; in parts that may drift where nobody waits."""
    kinds = ([i for i in rest if seats_of[i]], [i for i in rest if not seats_of[i]])
    wanted = math.ceil(phases / of.workers) if of.workers else 1
    parts: list[list[int]] = []
    for alike in filter(None, kinds):
        count = min(len(alike), max(1, round(wanted * len(alike) / len(rest))))
        parts += [alike[k::count] for k in range(count)]
    return parts
