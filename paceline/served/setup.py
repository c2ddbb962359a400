"""Before step 1: members find each other, agree on a plan, and lay out their memory."""

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline import spec
from paceline.collectives.context import Context
from paceline.collectives.notes import Meeting
from paceline.launch import Identity
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.placement import seats as seats_of
from paceline.protocol.plan import check, placement_of
from paceline.protocol.seat import SeatMachine
from paceline.served.client import WorkerSide
from paceline.served.compression import Codec, make_codec
from paceline.served.device import DeviceWorker, Staging, open_staging, use_free_cores
from paceline.served.job_plan import AnyMessage, JobPlan
from paceline.served.loop import MemberLoop
from paceline.served.memory import Flats
from paceline.served.server import ServerSide
from paceline.served.shapes import Exchanged, check_plan, make_job_plan, shape_of
from paceline.served.transports import Local, Shared, Spared, Transport, Transports, Wire
from paceline.wire import Mailbox, Segment, Ticket

LEAVING_SECONDS = 0.002
LEAST_LIMIT_BYTES = 64 << 20
"""A connection that announces a larger payload than this and than its chunks is closed."""


@dataclass(kw_only=True)
class OpenMember:
    """One member's part: its loop, the sides it has, and the memory they use."""

    plan: JobPlan
    mailbox: Mailbox[AnyMessage]
    loop: MemberLoop
    server: ServerSide | None
    memory: list[Flats]

    def serve(self) -> None:
        """Be nothing but a server, until every worker has left."""
        self.loop.run(lambda: self.server is not None and self.server.machine.over)

    def counters(self) -> dict[str, object]:
        if self.server is None:
            return {}
        return {**self.server.counters(), "refused_packets": self.mailbox.refused}

    def close(self, seconds: float) -> None:
        self.loop.stop()
        self.mailbox.close()
        for flats in self.memory:
            flats.close()


@dataclass(kw_only=True)
class OpenWorker(OpenMember):
    worker: WorkerSide
    held: Flats
    """Where this worker reads weights, or averaged gradients."""

    read: Flats
    """Where its tensors find them: the same, or a copy on their device."""

    staging: Staging | None
    """Its way to the device, if it computes on one."""

    gradients: Flats | None
    """Where it leaves gradients for servers that share its memory."""

    meeting: Meeting

    def counters(self) -> dict[str, object]:
        counted = super().counters()
        counted["late_chunks"] = self.worker.machine.late_chunks
        counted["exchanged_bytes_sent"] = self.mailbox.bytes_sent
        counted["exchanged_bytes_received"] = self.mailbox.bytes_received
        return {**counted, **self.worker.codec.counters()}

    def close(self, seconds: float, *, failed: bool = False) -> None:
        """Leave, and go on serving until every other worker has left or `seconds` are over.

        One that failed does not leave where the others can go on: it is lost to them."""
        end, machine = time.monotonic() + seconds, self.worker.machine
        self.worker.leave(failed=failed)
        while not machine.may_end(served=self.server is None or self.server.machine.over):
            if time.monotonic() > end or self.worker.failure is not None:
                break
            time.sleep(LEAVING_SECONDS)
        self.worker.close()
        self.loop.stop()  # it starts copies too
        if self.staging is not None:
            self.staging.close()
        super().close(seconds)


def set_up_worker(options: spec.Server, context: Context, exchanged: Exchanged) -> OpenWorker:
    """This worker's part. After it every worker's tensors have worker 0's values; where it joins a
    job that runs, those which the servers have when its first step begins."""
    identity, meeting = context.identity, Meeting(context)
    leads, joins = identity.rank == 0, identity.has_joined
    plan, served = _agree(options, identity, meeting, exchanged)
    mailbox = _open_mailbox(options, context, meeting, plan, leads)
    gradients = None
    serves_alone = all(seat.member == identity.name for seat in plan.seats)
    if plan.rules.shared and not serves_alone:
        gradients = _offer_gradients(plan, meeting, identity)
    exclusive = plan.rules.exclusive
    pinned = exchanged.device.type == "cuda"
    held = served if exclusive and served is not None else Flats.private(plan.layout, pinned=pinned)
    if held is not served and plan.rules.updates:
        write_tensors(exchanged.tensors, held)
    store = served or (held if exclusive else Flats.private(plan.layout))
    codec = make_codec(options.compression, options.topk_fraction)
    wire = Wire(held, codec, keeps=plan.rules.second_homes)
    local = Local(held, store, wire)
    server = None
    if plan.seat_of(identity.name) is not None:
        server = _make_server(options, identity, plan, meeting, store, local)
    staging = open_staging(context, exchanged.device, plan.layout, held, gradients)
    apart: Transport = wire
    if gradients is not None:
        apart = Shared(gradients, held, store, copies=plan.rules.copies)
    inside: Transport = Spared(local, wire) if plan.rules.second_homes else local
    worker = _make_worker(context, plan, mailbox, held, codec, (apart, inside), staging)
    loop = MemberLoop(plan, mailbox, worker, server, context.note)
    member = OpenWorker(
        plan=plan,
        mailbox=mailbox,
        loop=loop,
        server=server,
        memory=[flats for flats in (served, held, gradients) if flats is not None],
        worker=worker,
        held=held,
        read=held if staging is None else staging.weights,
        staging=staging,
        gradients=gradients,
        meeting=meeting,
    )
    _connect(mailbox, plan, meeting)
    loop.start(lambda: use_free_cores(plan, identity))
    if joins:
        worker.join()
    elif plan.rules.updates or plan.rules.second_homes:
        _share_weights(plan, worker, held, served, leads)
    if plan.rules.updates:
        read_tensors(exchanged.tensors, held)
    if not joins:
        _start_together(member, identity)
    return member


def _start_together(member: OpenWorker, identity: Identity) -> None:
    """Whoever starts to train may overwrite what another still reads."""
    own = " ".join(map(str, os.sched_getaffinity(0)))
    cores = [note.split() for note in member.meeting.gather("started", own, identity.workers)]
    are_disjoint = sum(map(len, cores)) == len(set().union(*cores))
    # What a worker on a device waits for comes from a thread that needs the interpreter.
    waits_alone = member.staging is None and not identity.servers
    if member.plan.rules.shared and waits_alone and are_disjoint:
        member.loop.spin()


def set_up_server(options: spec.Server, context: Context) -> OpenMember | None:
    """A server member's part; None when the placement gives it no share."""
    identity, meeting = context.identity, Meeting(context)
    shape = shape_of(identity)
    check(options, shape)
    table = seats_of(placement_of(options, shape), identity.workers, identity.servers)
    if identity.name not in {seat.member for seat in table}:
        return None
    plan = meeting.read("plan", JobPlan, "worker0")
    use_free_cores(plan, identity)
    mailbox = _open_mailbox(options, context, meeting, plan, leads=False)
    store = _reach_served(plan) or Flats.private(plan.layout)
    server = _make_server(options, identity, plan, meeting, store)
    loop = MemberLoop(plan, mailbox, None, server, context.note)
    return OpenMember(plan=plan, mailbox=mailbox, loop=loop, server=server, memory=[store])


def _reach_served(plan: JobPlan) -> Flats | None:
    """Memory that worker 0 made for the served values; None if members share no memory."""
    return None if plan.ticket is None else Flats.shared(plan.layout, Segment.attach(plan.ticket))


def _agree(
    options: spec.Server,
    identity: Identity,
    meeting: Meeting,
    exchanged: Exchanged,
) -> tuple[JobPlan, Flats | None]:
    """The plan that worker 0 makes, and the memory where all find what is served, if they share."""
    served: Flats | None = None
    if identity.rank == 0:
        plan = make_job_plan(exchanged, options, identity)
        if plan.rules.shared:
            served = Flats.shared(plan.layout)
            assert served.segment is not None
            plan = msgspec.structs.replace(plan, ticket=served.segment.ticket)
            if plan.rules.updates:
                write_tensors(exchanged.tensors, served)
        meeting.leave("plan", plan)
    plan = meeting.read("plan", JobPlan, "worker0")
    check_plan(plan, exchanged)
    if served is None:
        served = _reach_served(plan)
    return plan, served


def write_tensors(tensors: Sequence[Tensor], flats: Flats) -> None:
    """After it others may read them there."""
    flats.clear_padding()
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            flats.parameter(index, tensor).copy_(tensor)


def read_tensors(tensors: Sequence[Tensor], flats: Flats) -> None:
    """After it others may write there."""
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            tensor.copy_(flats.parameter(index, tensor))


def _open_mailbox(
    options: spec.Server, context: Context, meeting: Meeting, plan: JobPlan, leads: bool
) -> Mailbox[AnyMessage]:
    """The member's mailbox; if it serves, its address is made known."""
    identity = context.identity
    # Inside one host, and in emulated hosts nobody else can reach, the key admits members; between
    # real hosts what they say is encrypted too, unless the user trusts the network.
    exposed = not identity.on_one_host and not identity.owns_interfaces
    chunk_bytes = max((chunk.size_bytes for chunk in plan.layout.chunks), default=0)
    mailbox: Mailbox[AnyMessage] = Mailbox(
        identity.name,
        AnyMessage,
        meeting.key(identity.key, leads),
        encrypted=exposed and options.encrypt,
        largest_payload=max(LEAST_LIMIT_BYTES, 4 * chunk_bytes),  # optimizer state, places beside
    )
    if plan.seat_of(identity.name) is not None:
        endpoint = mailbox.listen("" if plan.rules.shared else identity.address)
        meeting.leave(f"mailbox/{identity.name}", endpoint)
    return mailbox


def _offer_gradients(plan: JobPlan, meeting: Meeting, identity: Identity) -> Flats:
    gradients = Flats.shared(plan.layout)
    assert gradients.segment is not None
    meeting.leave(f"gradients/{identity.name}", gradients.segment.ticket)
    return gradients


def _make_server(
    options: spec.Server,
    identity: Identity,
    plan: JobPlan,
    meeting: Meeting,
    store: Flats,
    local: Transport | None = None,
) -> ServerSide:
    """Return the server of this process. `local`: the way to its worker, if it has one."""
    own, rules = identity.name, plan.rules
    seat = plan.seat_of(own)
    assert seat is not None
    wire = Wire(store, make_codec(options.compression, options.topk_fraction))

    def way_to(name: str) -> Transport:
        if not rules.shared:
            return wire
        ticket = meeting.read(f"gradients/{name}", Ticket, name)
        gradients = Flats.shared(plan.layout, Segment.attach(ticket))
        return Shared(gradients, None, store, copies=rules.copies)

    workers = [f"worker{worker}" for worker in range(plan.workers)]
    here = {own: local} if local is not None else {}
    known = {name: here.get(name) or way_to(name) for name in workers}
    transports = Transports(known, way_to)
    machine = SeatMachine(plan, seat, assigned=rules.shared)
    return ServerSide(plan=plan, machine=machine, served=store, transports=transports)


def _make_worker(
    context: Context,
    plan: JobPlan,
    mailbox: Mailbox[AnyMessage],
    held: Flats,
    codec: Codec,
    ways: tuple[Transport, Transport],
    staging: Staging | None,
) -> WorkerSide:
    """`ways`: to other members' seats, and to the one in this process."""
    (apart, inside), own = ways, plan.seat_of(mailbox.name)
    common: dict[str, Any] = {
        "plan": plan,
        "machine": ExchangeMachine(plan, context.identity.rank),
        "held": held,
        "transports": [inside if owner == own else apart for owner in plan.owners],
        "inside": inside,
        "codec": codec,
        "wake": mailbox.wake,
        "lost_from": context.membership.failed_from,
        "deadline_seconds": context.deadline_seconds,
    }
    return WorkerSide(**common) if staging is None else DeviceWorker(staging, **common)


def _connect(mailbox: Mailbox[AnyMessage], plan: JobPlan, meeting: Meeting) -> None:
    for seat in plan.seats:
        if seat.member != mailbox.name:
            mailbox.connect(seat.member, meeting.read(f"mailbox/{seat.member}", str, seat.member))


def _share_weights(
    plan: JobPlan, worker: WorkerSide, held: Flats, served: Flats | None, leads: bool
) -> None:
    """After it every worker holds worker 0's weights."""
    chunks = range(len(plan.owners))
    if plan.rules.shared:
        assert served is not None
        for chunk in chunks if held is not served else ():
            held.chunk(chunk).copy_(served.chunk(chunk))
        return
    if leads:
        for chunk in chunks:
            worker.assign(chunk, held.chunk(chunk))
    worker.fetch()
    worker.wait_all()


def share_rest(
    tensors: Sequence[Tensor],
    meeting: Meeting,
    rank: int,
    key: str = "rest",
    leader: int = 0,
    lost: Collection[int] | None = None,
) -> None:
    """Give every worker the leader's values of what is not exchanged: buffers, frozen weights.

    Afterwards buffers are each worker's own, as means and variances of batch norm are of the
    batches it saw. A checkpoint of worker 0 holds worker 0's. Without a leader that is `lost`
    meanwhile each keeps its own.
    """
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            if rank == leader:
                flat = tensor.detach().cpu().contiguous().view(-1)
                meeting.leave(f"{key}/{number}", bytes(flat.view(torch.uint8).numpy()))
            else:
                try:
                    told = meeting.read_unless_lost(f"{key}/{number}", bytes, leader, lost)
                except LookupError:
                    return
                data = bytearray(told)
                values = torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype)
                tensor.copy_(values.view(tensor.shape))
