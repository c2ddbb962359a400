"""Before step 1: members find each other, agree on a plan, and lay out their memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import spec
from paceline.architectures.base import Context
from paceline.architectures.compression import make_codec
from paceline.architectures.server.control import AnyMessage, Plan
from paceline.architectures.server.exchange import WorkerSide
from paceline.architectures.server.loop import MemberLoop
from paceline.architectures.server.meeting import Meeting
from paceline.architectures.server.memory import Flats
from paceline.architectures.server.plan import (
    Exchanged,
    check_plan,
    make_plan,
    placement_of,
    shares_memory,
)
from paceline.architectures.server.serving import ServerSide
from paceline.errors import SpecError
from paceline.launch import Identity
from paceline.protocol import ServerMachine, WorkerMachine, of_size
from paceline.protocol.placement import seats as seats_of
from paceline.wire import Post, Segment, StreamPost, Ticket, ZeroMqPost


@dataclass(kw_only=True)
class Member:
    """One member's part: its loop, the sides it has, and the memory they use."""

    plan: Plan
    post: Post[AnyMessage]
    loop: MemberLoop
    server: ServerSide | None
    memory: list[Flats]

    def serve(self) -> None:
        """Be nothing but a server, until every worker has left."""
        self.loop.run(lambda: self.server is not None and self.server.finished)

    def counters(self) -> dict[str, object]:
        return self.server.counters() if self.server is not None else {}

    def close(self, seconds: float) -> None:
        self.loop.stop()
        self.post.close()
        for flats in self.memory:
            flats.close()


@dataclass(kw_only=True)
class WorkerMember(Member):
    worker: WorkerSide
    held: Flats
    """Where this worker reads weights, or averaged gradients."""

    gradients: Flats | None
    """Where it leaves gradients for servers that share its memory."""

    meeting: Meeting

    def counters(self) -> dict[str, object]:
        counted = super().counters()
        counted["late_chunks"] = self.worker.machine.late_chunks
        counted["exchanged_bytes_sent"] = self.post.bytes_sent
        counted["exchanged_bytes_received"] = self.post.bytes_received
        return {**counted, **self.worker.codec.counters()}

    def close(self, seconds: float) -> None:
        """Leave, and go on serving until every other worker has left or `seconds` are over."""
        self.worker.leave(self.worker.machine.step)
        end = time.monotonic() + seconds
        while self.server is not None and not self.server.finished:
            if time.monotonic() > end or self.worker.failure is not None:
                break
            time.sleep(0.01)
        super().close(seconds)


def check(options: spec.Server, identity: Identity) -> None:
    """Refuse what cannot work, before anything starts."""
    where = "architecture server"
    if options.placement == "optimal" and identity.servers == 0:
        problem = "placement = optimal, and there are no servers to share with."
        raise SpecError(where, problem, "add --servers, or write placement=colocated.")
    if options.mode == "quorum" and quorum_of(options, identity.workers) > identity.workers:
        problem = f"quorum = {options.quorum} of {identity.workers} workers."
        raise SpecError(where, problem, f"write at most {identity.workers}.")
    if options.update == "worker" and not is_exclusive(options):
        problem = f"update = worker with mode = {options.mode}: weights would drift apart."
        raise SpecError(where, problem, "leave update out, or write mode=sync.")
    if options.compression != "none" and shares_memory(options, identity):
        problem = f"compression = {options.compression}, and gradients do not leave this host."
        raise SpecError(where, problem, "leave compression out, or write transport=tcp.")


def quorum_of(options: spec.Server, workers: int) -> int:
    return options.quorum or max(1, workers - 1)


def is_exclusive(options: spec.Server) -> bool:
    """Weights stay unchanged until all workers have used them: the steps are synchronous."""
    return options.mode == "sync" or (options.mode == "bounded" and options.staleness == 0)


def set_up_worker(options: spec.Server, context: Context, exchanged: Exchanged) -> WorkerMember:
    """This worker's part. After it every worker's tensors have worker 0's values."""
    identity, meeting = context.identity, Meeting(context)
    leads = identity.rank == 0
    served: Flats | None = None
    if leads:
        plan = make_plan(exchanged, options, identity)
        if plan.shared:
            served = Flats.shared(plan.layout)
            assert served.segment is not None
            plan = _with_ticket(plan, served.segment)
            write_tensors(exchanged.tensors, served)
        meeting.leave("plan", plan)
    plan = meeting.read("plan", Plan, "worker0")
    check_plan(plan, exchanged)
    if plan.ticket is not None and served is None:
        served = Flats.shared(plan.layout, Segment.attach(plan.ticket))
    post, seat = _open_post(options, context, meeting, plan, leads)
    gradients = None
    if plan.shared and any(seat.member != identity.name for seat in plan.seats):
        gradients = _offer_gradients(plan, meeting, identity)
    exclusive = is_exclusive(options)
    held = served if exclusive and served is not None else Flats.private(plan.layout)
    if held is not served:
        write_tensors(exchanged.tensors, held)
    server = None
    if seat is not None:
        store = served or (held if exclusive else Flats.private(plan.layout))
        server = _make_server(options, context, plan, meeting, post, seat, store)
    worker = _make_worker(options, context, plan, post, seat, held, served, gradients)
    loop = MemberLoop(post, worker, server)
    member = WorkerMember(
        plan=plan,
        post=post,
        loop=loop,
        server=server,
        memory=[flats for flats in (served, held, gradients) if flats is not None],
        worker=worker,
        held=held,
        gradients=gradients,
        meeting=meeting,
    )
    _connect(post, plan, meeting)
    loop.start()
    worker.join()
    _share_weights(plan, worker, held, served, leads)
    read_tensors(exchanged.tensors, held)
    # Whoever starts to train may overwrite what another still reads.
    meeting.gather("started", "", identity.workers)
    return member


def set_up_server(options: spec.Server, context: Context) -> Member | None:
    """A server member's part; None when the placement gives it no share."""
    check(options, context.identity)
    identity, meeting = context.identity, Meeting(context)
    table = seats_of(placement_of(options, identity), identity.workers, identity.servers)
    if identity.name not in {seat.member for seat in table}:
        return None
    plan = meeting.read("plan", Plan, "worker0")
    post, seat = _open_post(options, context, meeting, plan, leads=False)
    assert seat is not None
    if plan.ticket is not None:
        store = Flats.shared(plan.layout, Segment.attach(plan.ticket))
    else:
        store = Flats.private(plan.layout)
    server = _make_server(options, context, plan, meeting, post, seat, store)
    loop = MemberLoop(post, None, server)
    return Member(plan=plan, post=post, loop=loop, server=server, memory=[store])


def write_tensors(tensors: Sequence[Tensor], flats: Flats) -> None:
    flats.clear_padding()
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            flats.parameter(index, tensor).copy_(tensor)


def read_tensors(tensors: Sequence[Tensor], flats: Flats) -> None:
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            tensor.copy_(flats.parameter(index, tensor))


def _with_ticket(plan: Plan, segment: Segment) -> Plan:
    fields = {name: getattr(plan, name) for name in plan.__struct_fields__}
    return Plan(**{**fields, "ticket": segment.ticket})


def _open_post(
    options: spec.Server, context: Context, meeting: Meeting, plan: Plan, leads: bool
) -> tuple[Post[AnyMessage], int | None]:
    """The member's mailbox, and its seat if it serves: then its address is made known."""
    identity = context.identity
    # Inside one host, and in emulated hosts nobody else can reach, the key admits members; between
    # real hosts what they say is encrypted too, unless the user trusts the network.
    exposed = not identity.on_one_host and not identity.owns_interfaces
    kind = ZeroMqPost if exposed and options.encrypt else StreamPost
    post: Post[AnyMessage] = kind(identity.name, AnyMessage, meeting.key(identity.key, leads))
    members = [seat.member for seat in plan.seats]
    if identity.name not in members:
        return post, None
    endpoint = post.bind("" if plan.shared else identity.address)
    meeting.leave(f"post/{identity.name}", endpoint)
    return post, members.index(identity.name)


def _offer_gradients(plan: Plan, meeting: Meeting, identity: Identity) -> Flats:
    gradients = Flats.shared(plan.layout)
    assert gradients.segment is not None
    meeting.leave(f"gradients/{identity.rank}", gradients.segment.ticket)
    return gradients


def _make_server(
    options: spec.Server,
    context: Context,
    plan: Plan,
    meeting: Meeting,
    post: Post[AnyMessage],
    seat: int,
    store: Flats,
) -> ServerSide:
    workers = context.identity.workers
    gradients = {}
    if plan.shared:
        for worker in range(workers):
            if f"worker{worker}" != context.identity.name:
                ticket = meeting.read(f"gradients/{worker}", Ticket, f"worker{worker}")
                gradients[worker] = Flats.shared(plan.layout, Segment.attach(ticket))
    machine = ServerMachine(
        [chunk for chunk, owner in enumerate(plan.owners) if owner == seat],
        of_size(workers),
        mode=options.mode,
        staleness=options.staleness,
        quorum=quorum_of(options, workers),
    )
    return ServerSide(
        plan=plan,
        seat=seat,
        machine=machine,
        served=store,
        gradients=gradients,
        post=post,
        codec=make_codec(options.compression, options.topk_fraction),
        exclusive=is_exclusive(options),
        answers_early=options.mode == "bounded" and options.staleness > 0,
    )


def _make_worker(
    options: spec.Server,
    context: Context,
    plan: Plan,
    post: Post[AnyMessage],
    seat: int | None,
    held: Flats,
    served: Flats | None,
    gradients: Flats | None,
) -> WorkerSide:
    machine = WorkerMachine(
        context.identity.rank,
        plan.layout.chunks,
        plan.owners,
        window=None if plan.shared else options.window,
        own_seat=seat,
        declares=options.mode == "quorum",
    )
    worker = WorkerSide(
        plan=plan,
        worker=context.identity.rank,
        machine=machine,
        held=held,
        served=None if held is served else served,
        gradients=gradients,
        post=post,
        codec=make_codec(options.compression, options.topk_fraction),
        deadline_seconds=context.deadline_seconds,
    )
    post.place = worker.place
    return worker


def _connect(post: Post[AnyMessage], plan: Plan, meeting: Meeting) -> None:
    for seat in plan.seats:
        if seat.member != post.name:
            post.connect(seat.member, meeting.read(f"post/{seat.member}", str, seat.member))


def _share_weights(
    plan: Plan, worker: WorkerSide, held: Flats, served: Flats | None, leads: bool
) -> None:
    """After it every worker holds worker 0's weights."""
    chunks = range(len(plan.owners))
    if plan.shared:
        assert served is not None
        for chunk in chunks if held is not served else ():
            held.chunk(chunk).copy_(served.chunk(chunk))
        return
    if leads:
        for chunk in chunks:
            worker.assign(chunk, held.chunk(chunk))
    worker.pull(chunks)
    worker.wait_all()


def share_rest(tensors: Sequence[Tensor], meeting: Meeting, leads: bool, key: str = "rest") -> None:
    """Give every worker worker 0's values of what is not exchanged: buffers, frozen weights.

    Afterwards buffers are each worker's own, as means and variances of batch norm are of the
    batches it saw. A checkpoint of worker 0 holds worker 0's.
    """
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            if leads:
                flat = tensor.detach().cpu().contiguous().view(-1)
                meeting.leave(f"{key}/{number}", bytes(flat.view(torch.uint8).numpy()))
            else:
                data = bytearray(meeting.read(f"{key}/{number}", bytes, "worker0"))
                values = torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype)
                tensor.copy_(values.view(tensor.shape))
