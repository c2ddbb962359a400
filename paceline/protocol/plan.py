"""From parameters, options and a cluster's shape to a plan: chunks, who serves them, the rules.

    plan = make_plan(sizes, spec.Server(mode="bounded"), Shape(workers=4, servers=2))

One function for the runtime, the predictor and tests, so that what is planned is planned once. What
cannot work is refused here, before anything starts.
"""

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from paceline import spec
from paceline.errors import SpecError
from paceline.protocol.chunks import Layout, ParameterSize
from paceline.protocol.messages import Settings
from paceline.protocol.placement import Placement, Seat, cut_and_deal, deal, seats
from paceline.spec.hosts import one_by_one

Mode = Literal["sync", "async", "bounded", "quorum"]

SHARED_CHUNK_BYTES = 2 << 20, 512 << 10
"""Preferred, and the least that makes sense, here and below. In shared memory only descriptors
travel, and the work per chunk is what counts beside sums."""

ACCELERATED_CHUNK_BYTES = 8 << 20, 512 << 10
"""The same where workers compute on GPUs: a chunk's sum takes less time than the interpreter needs
for what surrounds it. ResNet-50, workers that serve: 0.85 of `single` with 2 MiB, 0.95 with 8."""

TRAVELLING_CHUNK_BYTES = 256 << 10, 64 << 10
"""On a network a small chunk lets an urgent one overtake soon; beat 1 MiB in trials at 1 Gbit."""

LOOPBACK_CHUNK_BYTES = 4 << 20, 256 << 10
"""Inside one host the work per message is what limits, so messages are few."""

TURN_SECONDS = 0.0005
"""How long a server works before it looks again at what has come."""

GATHER_SECONDS = 0.004
"""Messages that move no payload are gathered this long while there is work, so that many share one
packet."""

WHERE = "architecture server"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How many members there are, and which of them share a host."""

    workers: int
    servers: int = 0
    hosts: tuple[int, ...] = ()
    """The host of each member, workers first; left out: each has one of its own."""

    goes_on: bool = False
    """Those who are left go on without a lost worker."""

    accelerated: bool = False
    """Workers compute on GPUs."""

    @property
    def on_one_host(self) -> bool:
        members = self.workers + self.servers
        return len(set(self.hosts)) == 1 if self.hosts else members == 1


def written_shape(experiment: spec.Experiment) -> Shape:
    """The shape of a job as it is written; on this machine all members share a host."""
    cluster, servers = experiment.cluster, experiment.num_servers
    hosts = [0] * (cluster.workers + servers)
    if experiment.engine != "here":
        placed = list(enumerate(one_by_one(experiment)))
        hosts = [number for number, host in placed for _ in range(host.workers)]
        hosts += [number for number, host in placed for _ in range(host.servers)]
    return Shape(
        workers=cluster.workers,
        servers=servers,
        hosts=tuple(hosts),
        goes_on=cluster.goes_on,
        accelerated=cluster.device == "cuda",
    )


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine goes by, beside the chunks."""

    mode: Mode = "sync"
    staleness: int = 0
    """How many steps a worker may be ahead of the slowest; 0 in all modes but `bounded`."""

    staleness_aware: bool = False
    """The rate of each update is divided by 1 + how many updates its gradients lacked."""

    quorum: int = 0
    """How many workers make a step; 0 in all modes but `quorum`."""

    window: int | None = None
    """Chunks for each seat that may wait to depart, in all; None where nothing departs."""

    exclusive: bool = True
    """A chunk's weights stay as they are from the answer until all workers push it again: they may
    be read where they lie, and all workers end together."""

    shared: bool = False
    """Payloads lie in memory that all members see."""

    updates: bool = True
    """Servers may hold weights and update them; else they only return the mean of gradients."""

    least_workers: int | None = None
    """So many must be left when one is lost, or the job stops; None: all of them."""

    leader: int | None = 0
    """The worker that speaks for all: without it nobody could end in order. None where the next
    one does then."""

    whole: bool = False
    """No step closes before all its gradients are at all seats, and those of a lost worker count in
    all chunks or in none: the others can go on."""

    second_homes: bool = False
    """What a server has is with workers too: those that are left go on without it."""

    copies: bool = False
    """A worker may write its next gradient before this one is summed: shared ones are copied."""

    @property
    def waits_for_all(self) -> bool:
        """A step is of all workers, each gradient named by its number."""
        return self.mode in ("sync", "bounded")

    @property
    def cut_steps(self) -> int:
        """After so many the batch is divided among those who are left: a worker that is told of a
        cut before it is answered has divided the batches of so many steps."""
        return self.staleness + 2

    def cannot_go_on(self, lost: int, left: int) -> str:
        """Why the job stops when a worker is lost and so many are left; empty when it goes on."""
        if self.least_workers is None:
            return f"mode={self.mode} waits for every worker"
        if lost == self.leader:
            return "it spoke for all workers"
        if left < self.least_workers:
            return f"{left} of the {self.least_workers} workers that it takes are left"
        return ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the machines of one exchange must agree on."""

    layout: Layout
    owners: tuple[int, ...]
    """The seat of each chunk."""

    seats: tuple[Seat, ...]
    workers: int
    rules: Rules
    groups: list[Settings] = msgspec.field(default_factory=list)
    """Settings of each parameter group until a worker says otherwise."""

    def chunks_of(self, seat: int) -> list[int]:
        return [chunk for chunk, owner in enumerate(self.owners) if owner == seat]

    def seat_of(self, member: str) -> int | None:
        """The seat in a member's process, if it has one."""
        names = [seat.member for seat in self.seats]
        return names.index(member) if member in names else None


def make_plan(
    parameters: Sequence[ParameterSize],
    options: spec.Server,
    shape: Shape,
    groups: Sequence[Settings] = (),
) -> Plan:
    """The plan of one exchange; SpecError for what cannot work."""
    check(options, shape)
    table = seats(placement_of(options, shape), shape.workers, shape.servers)
    preferred, least = suitable_bytes(options, shape)
    shares = [seat.share for seat in table]
    layout, owners = cut_and_deal(parameters, shares, preferred, least)
    return Plan(
        layout=layout,
        owners=owners,
        seats=table,
        workers=shape.workers,
        rules=rules_of(options, shape),
        groups=list(groups),
    )


def rules_of(options: spec.Server, shape: Shape) -> Rules:
    goes_on, shared = shape.goes_on, shares_memory(options, shape)
    staleness = options.staleness if options.mode == "bounded" else 0
    quorum = quorum_of(options, shape.workers) if options.mode == "quorum" else 0
    waits = options.waits_for_all
    return Rules(
        mode=options.mode,
        staleness=staleness,
        staleness_aware=options.staleness_aware,
        quorum=quorum,
        least_workers=None if waits and not goes_on else max(1, quorum),
        leader=None if goes_on else 0,
        whole=waits and goes_on,
        second_homes=goes_on and not why_no_second_homes(options, shape),
        window=None if shared else options.window,
        exclusive=options.exclusive,
        shared=shared,
        updates=options.update != "worker",
        copies=shared and staleness > 0,
    )


def why_no_second_homes(options: spec.Server, shape: Shape) -> str:
    """Why nobody could go on without what a lost member served; empty where they can."""
    table = seats(placement_of(options, shape), shape.workers, shape.servers)
    if options.mode != "sync":
        return f"mode={options.mode} has no second homes for what it served"
    if len(table) < 2:
        return "there is no other server"
    if shares_memory(options, shape):
        return "weights lie in memory that it writes to; transport=tcp has second homes for them"
    if shape.accelerated:
        return "workers compute on GPUs, where the next gradients overwrite what nobody else has"
    if options.compression != "none" and workers_serve(options, shape):
        return f"compression={options.compression} leaves out what only the lost one had"
    return ""


def check(options: spec.Server, shape: Shape) -> None:
    """Refuse what cannot work, before anything starts."""
    if options.placement == "optimal" and shape.servers == 0:
        problem = "placement = optimal, and there are no servers to share with."
        raise SpecError(WHERE, problem, "add --servers, or write placement=colocated.")
    if options.mode == "quorum" and quorum_of(options, shape.workers) > shape.workers:
        problem = f"quorum = {options.quorum} of {shape.workers} workers."
        raise SpecError(WHERE, problem, f"write at most {shape.workers}.")
    if shape.goes_on and workers_serve(options, shape):
        why = why_no_second_homes(options, shape)
        if why:
            problem = f"workers serve, and one that is lost takes weights with it: {why}."
            raise SpecError("--on-loss", problem, "add --servers, or write stop and --restarts.")
    if options.compression != "none" and shares_memory(options, shape):
        problem = f"compression = {options.compression}, and gradients do not leave this host."
        raise SpecError(WHERE, problem, "leave compression out, or write transport=tcp.")


def placement_of(options: spec.Server, shape: Shape) -> Placement:
    """`dedicated` without any server means that the workers serve."""
    lacks_servers = options.placement == "dedicated" and shape.servers == 0
    return "colocated" if lacks_servers else options.placement


def workers_serve(options: spec.Server, shape: Shape) -> bool:
    """Some seat is inside a worker."""
    table = seats(placement_of(options, shape), shape.workers, shape.servers)
    return any(seat.worker is not None for seat in table)


def quorum_of(options: spec.Server, workers: int) -> int:
    """All but one, unless asked otherwise."""
    return options.quorum or max(1, workers - 1)


def shares_memory(options: spec.Server, shape: Shape) -> bool:
    if options.transport == "shm" and not shape.on_one_host:
        problem = "transport = shm, and the members are on several hosts."
        raise SpecError(WHERE, problem, "write transport=tcp, or leave it out.")
    if options.transport != "auto":
        return options.transport == "shm"
    # What a worker writes to as it is lost must not be all that the others have.
    return shape.on_one_host and not (shape.goes_on and workers_serve(options, shape))


def suitable_bytes(options: spec.Server, shape: Shape) -> tuple[int, int]:
    """The size of a chunk that suits the way it goes, and the least that makes sense."""
    if options.piece_bytes is not None:
        return options.piece_bytes, options.piece_bytes
    if shares_memory(options, shape):
        return ACCELERATED_CHUNK_BYTES if shape.accelerated else SHARED_CHUNK_BYTES
    return LOOPBACK_CHUNK_BYTES if shape.on_one_host else TRAVELLING_CHUNK_BYTES


def deal_without(plan: Plan, lost: Collection[int]) -> tuple[int, ...]:
    """The owners in a generation that has lost these seats.

    Only what they served is dealt anew, in proportion to the shares of those that are left: what
    the others hold stays where it is.
    """
    left = [0.0 if seat in lost else s.share for seat, s in enumerate(plan.seats)]
    orphans = [c for c, owner in zip(plan.layout.chunks, plan.owners, strict=True) if owner in lost]
    adopted = dict(zip((c.index for c in orphans), deal(orphans, left), strict=True))
    return tuple(adopted.get(chunk, owner) for chunk, owner in enumerate(plan.owners))
