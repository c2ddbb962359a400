"""A step with servers: `server` in all modes and placements, `hybrid` with them between hosts."""

import math

import msgspec

from paceline import spec
from paceline.predict.cells import EXACT_MEMBERS, PHASES, HostCell, cells_of, lay_out
from paceline.predict.dealing import Lot, deal, hot_seats, merge
from paceline.predict.exchange import INSIDE, MOST_STEPS, CellGroup, Job, SeatGroup
from paceline.predict.model import COLLECTIVES_ONLY, Model
from paceline.predict.outcome import ClassStep, Outcome, WorkerLoad, paces_of, wait_seconds, work_of
from paceline.predict.stacks import Constants, Stack
from paceline.predict.timeline import Timeline
from paceline.predict.topology import Topology
from paceline.protocol.chunks import Layout, ParameterSize
from paceline.protocol.placement import Seat
from paceline.protocol.plan import (
    TRAVELLING_CHUNK_BYTES,
    Plan,
    Shape,
    quorum_of,
    rules_of,
    why_no_second_homes,
)

MOST_CHUNKS = 200
"""So finely a prediction cuts; a real run cuts finer, which changes its step by less than 1 %."""

MOST_CHUNKS_EACH = 400
"""Where every member is simulated by itself. Shares that differ need it: with `optimal`, chunks
twice as large, and with them a window of twice the bytes, cost 5 %."""

STRETCHES, STRETCHES_IN_STEP = 8, 48
"""Into so many parts a network is divided; finer where all workers are in step, which is cheap."""
MOST_GROUPS = 20
"""Of workers that drift apart. A saturated server was within 2 % of its limit, with half as many
12 % below it."""

MOST_PUSHES = 1200
"""Of a step, where hosts are not alike and every kind pushes for itself."""

MOST_AHEAD = 6
"""Steps that quick workers are let run ahead: once they are, all go at the slowest's pace."""

COARSE_CHUNKS, COARSE_PHASES, COARSE_STEPS = 64, 4, 8


def server_step(
    experiment: spec.Experiment,
    topology: Topology,
    stack: Stack,
    constants: Constants,
    *,
    coarse: bool = False,
    timeline: Timeline | None = None,
) -> Outcome:
    """Some steps on the virtual clock, with as much collapsed as the cluster allows."""
    together = experiment.architecture.waits_for_all
    in_host = stack.sums_in_host or experiment.architecture.sums_in_host
    leaders = in_host and together
    dealt = _deal(experiment, topology, stack, constants, leaders=leaders, coarse=coarse)
    groups = _groups(experiment, topology, constants, dealt.cells, leaders=leaders)
    seats = _seats(dealt, groups)
    plan = _plan(experiment, stack, dealt, seats, groups)
    collapsed = len(groups) < (topology.computing_hosts if leaders else topology.workers)
    job = Job(
        experiment,
        topology,
        stack,
        constants,
        groups,
        seats,
        dealt.lots,
        plan,
        unevenness=dealt.unevenness,
        noisy=not collapsed,
        most_steps=COARSE_STEPS if coarse else MOST_STEPS,
        timeline=timeline,
    )
    step = job.run()
    typical = max(groups, key=lambda group: group.count)
    late = 0.0
    if together:
        jitter = typical.cell.of.jitter_fraction if collapsed else 0.0
        late = wait_seconds(typical.work, jitter, topology.workers, constants)
    # Devices that add up compute less.
    summing = min(job.needs().get(INSIDE, 0.0), typical.work.busy_seconds)
    lost = constants.contention_fraction * summing
    paces = paces_of(
        experiment,
        topology,
        constants,
        lambda of: job.step_seconds(of) + lost + late,
        together=together,
    )
    return _outcome(experiment, topology, job, typical, step + lost, late, paces)


class _Dealt(msgspec.Struct, frozen=True, kw_only=True):
    """What travels, and the cells and seats it travels between."""

    cells: list[HostCell]
    seats: list[tuple[tuple[HostCell, ...], int]]
    """Groups of seats that serve alike: the cells they stand in, and how many they are."""

    lots: list[Lot]
    unevenness: float = 1.0


def _deal(
    experiment: spec.Experiment,
    topology: Topology,
    stack: Stack,
    constants: Constants,
    *,
    leaders: bool,
    coarse: bool,
) -> _Dealt:
    """As finely as it pays to simulate, in as many phases as workers drift apart."""
    on_hosts, shares = lay_out(experiment, topology, leaders)
    work = work_of(experiment, topology.computing[0], topology, constants)
    kinds = len(topology.computing)  # hosts that are not alike drift apart by themselves
    phases = min(COARSE_PHASES if coarse else PHASES, max(1, MOST_GROUPS // kinds))
    if experiment.architecture.waits_for_all:
        phases = 1
    exact = topology.workers + len(shares) <= EXACT_MEMBERS
    finest = MOST_CHUNKS_EACH if exact else min(MOST_CHUNKS, math.ceil(MOST_PUSHES / kinds))
    most_chunks = min(COARSE_CHUNKS, finest) if coarse else finest
    if stack.place == "chunks":
        return _chunked(experiment, topology, stack, work, on_hosts, shares, phases, most_chunks)
    return _whole(topology, stack, work, on_hosts, shares, phases, most_chunks)


def _chunked(
    experiment: spec.Experiment,
    topology: Topology,
    stack: Stack,
    work: WorkerLoad,
    on_hosts: list[list[int]],
    shares: list[float],
    phases: int,
    most_chunks: int,
) -> _Dealt:
    """Chunks by bytes: seats are alike, so that those of a cell are dealt to as one."""
    sizes, options = [layer[2] for layer in work.layers], experiment.architecture
    wanted = options.piece_bytes
    least = 0 if wanted else sum(sizes) // most_chunks
    cells = cells_of(topology, on_hosts, (), phases=phases)
    collapsed = len(cells) < len(on_hosts)
    alike: list[tuple[tuple[HostCell, ...], tuple[int, ...]]] = [
        ((cell,), (seat,)) for cell in cells for seat in cell.seats
    ]
    if collapsed:
        alike = []
        for of in topology.classes:
            serving = tuple(cell for cell in cells if cell.of is of and cell.seats)
            if serving:
                alike.append((serving, tuple(seat for cell in serving for seat in cell.seats)))
    totals = [sum(shares[seat] for seat in own) for _, own in alike]
    seats = [(at, len(own)) for at, own in alike]
    return _Dealt(
        cells=cells,
        seats=seats,
        lots=deal(work.names, sizes, totals, stack, wanted, least),
        unevenness=_unevenness(sum(sizes), len(shares)) if collapsed else 1.0,
    )


def _whole(
    topology: Topology,
    stack: Stack,
    work: WorkerLoad,
    on_hosts: list[list[int]],
    shares: list[float],
    phases: int,
    most_chunks: int,
) -> _Dealt:
    """Whole variables: dealt to every real seat first, because some seats get more than others."""
    dealt = deal(work.names, [layer[2] for layer in work.layers], shares, stack, None)
    hot = hot_seats(dealt, len(shares))
    cells = cells_of(topology, on_hosts, hot, phases=phases)
    exact = len(cells) == len(on_hosts)
    alone = [c for c in cells if c.seats and (exact or not set(hot).isdisjoint(c.seats))]
    rest = tuple(cell for cell in cells if cell.seats and cell not in alone)
    at: list[tuple[HostCell, ...]] = [(cell,) for cell in alone] + ([rest] if rest else [])
    seats = [(own, sum(len(cell.seats) for cell in own)) for own in at]
    group_of = {s: i for i, own in enumerate(at) for cell in own for s in cell.seats}
    seconds = [forward + backward for forward, backward, _ in work.layers]
    stretches = min(most_chunks, STRETCHES_IN_STEP if phases == 1 else STRETCHES)
    merged = merge(dealt, [group_of[seat] for seat in range(len(shares))], seconds, stretches)
    return _Dealt(cells=cells, seats=seats, lots=merged)


def _unevenness(total_bytes: int, seats: int) -> float:
    """How much more than its share the fullest of many seats carries, at the least chunk size."""
    chunks = max(1, total_bytes // TRAVELLING_CHUNK_BYTES[1])
    return math.ceil(chunks / seats) / (chunks / seats)


def _seats(dealt: _Dealt, groups: list[CellGroup]) -> list[SeatGroup]:
    """Groups of seats; one that a single worker holds is in that worker's process."""
    holders = {
        cell.name: [group for group in groups if group.cell is cell and group.count == 1]
        for cell in dealt.cells
        if cell.hosts == 1 and not cell.of.servers
    }
    seats = []
    for index, (at, count) in enumerate(dealt.seats):
        own = holders.get(at[0].name, []) if len(at) == count == 1 else []
        member = own.pop(0).name if own else f"seat{index}"
        seats.append(SeatGroup(index, at, count, member))
    return seats


def _plan(
    experiment: spec.Experiment,
    stack: Stack,
    dealt: _Dealt,
    seat_groups: list[SeatGroup],
    groups: list[CellGroup],
) -> Plan:
    """What the machines go by; seats that serve alike are one seat, and groups are workers."""
    options = experiment.architecture.serving
    assert options is not None
    workers, seats = experiment.cluster.workers, len(seat_groups)
    quorum = round(quorum_of(options, workers) * len(groups) / workers)
    window = round(options.window * sum(count for _, count in dealt.seats) / seats)
    leave = options.gradients_leave(experiment.workload.gradient_use)
    collapsed = options.changed(
        update="worker" if leave == "for means" else options.update,
        transport="tcp",  # memory is one of the links
        staleness=min(options.staleness, MOST_AHEAD),
        quorum=max(1, quorum),
        window=max(1, window),
    )
    goes_on = experiment.cluster.goes_on and stack.exchange == "answer"
    rules = rules_of(collapsed, Shape(workers=len(groups), servers=seats, goes_on=goes_on))
    real = Shape(workers=workers, servers=experiment.num_servers)
    if goes_on and not why_no_second_homes(options.changed(transport="tcp"), real):
        rules = msgspec.structs.replace(rules, second_homes=True)  # of seats that are one here too
    if stack.place == "arrays":
        rules = msgspec.structs.replace(rules, window=None)
    chunks, work = tuple(lot.chunk for lot in dealt.lots), groups[0].work
    layers = zip(work.names, work.layers, strict=True)
    sizes = tuple(ParameterSize(name=n, elements=max(1, size // 4)) for n, (_, _, size) in layers)
    return Plan(
        layout=Layout(parameters=sizes, flats=(), places=(), chunks=chunks),
        owners=tuple(lot.owner for lot in dealt.lots),
        seats=tuple(Seat(member=seat.member, share=1 / seats) for seat in seat_groups),
        workers=len(groups),
        rules=rules,
    )


def _groups(
    experiment: spec.Experiment,
    topology: Topology,
    constants: Constants,
    cells: list[HostCell],
    *,
    leaders: bool,
) -> list[CellGroup]:
    groups: list[CellGroup] = []
    for cell in cells:
        if not cell.of.workers:
            continue
        work = work_of(experiment, cell.of, topology, constants)
        for _ in range(1 if leaders else cell.phases):
            per_host = 1.0 if leaders else cell.group_workers
            devices = cell.of.workers if leaders else 1
            groups.append(CellGroup(len(groups), cell, per_host, devices, work))
    return groups


def _outcome(
    experiment: spec.Experiment,
    topology: Topology,
    job: Job,
    typical: CellGroup,
    step: float,
    late: float,
    paces: tuple[ClassStep, ...],
) -> Outcome:
    work = typical.work
    phases = {
        "input": work.input_seconds,
        "forward": work.forward_seconds,
        "backward": work.backward_seconds,
        "exchange_exposed": max(0.0, step - work.busy_seconds - work.input_seconds),
        "update": work.update_seconds,
        "wait": late,
    }
    samples = experiment.workload.global_batch_for(topology.workers)
    return Outcome(
        step_seconds=step + late,
        samples_per_second=samples / (step + late),
        phases=phases,
        needs={"compute": job.compute_seconds(), **job.needs()},
        events=job.events,
        paces=paces,
    )


SERVED = Model(step=server_step, ignored=COLLECTIVES_ONLY)
