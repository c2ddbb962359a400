"""A worker whose tensors are on an accelerator: its exchange goes on in main memory beside it.

Gradients leave for main memory by a lane of their own while backward goes on, and weights come back
by another, chunk by chunk. No thread that trains waits for a copy: it marks a moment in what the
device computes, and the lanes and the device wait for each other's moments. Only weights that
servers still owe are waited for, where a layer needs them.
"""

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.collectives.context import Context
from paceline.errors import SpecError
from paceline.launch import Identity
from paceline.protocol.chunks import Layout
from paceline.served.client import Moment, Request, Submitted, WorkerSide
from paceline.served.job_plan import JobPlan
from paceline.served.memory import Flats, Piece, parts_of
from paceline.telemetry import StepClock
from paceline.wire import Segment

CLOSING_SECONDS = 5.0
SWITCH_SECONDS = 50e-6
"""How long a thread keeps others from the interpreter. Backward wants it for a moment at each of a
hundred gradients while the threads that move chunks hold it: ResNet-50 took 63 ms a step with 0.5
ms here, 58 with Python's own 5 ms and 50 with this, one run each (decision 108)."""

MOST_SERVER_THREADS = 8
"""More made updates of chunks no faster."""


class Lane(Protocol):
    """Copies between a device and main memory, in order, beside what the device computes.

    `copy`, `after` and `reached` are called by one thread alone, which computes nothing.
    """

    def here(self) -> Moment:
        """When all that the calling thread has asked the device for is done."""

    def after(self, moment: Moment) -> None:
        """Copies from now on begin when it is reached."""

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Have `sources` copied; all must stay as they are until `reached`."""

    def reached(self) -> Moment:
        """When all copies so far are done."""

    def follow(self, moment: Moment) -> None:
        """What the calling thread asks the device for from now on begins when it is reached."""

    def reuse(self, moment: Moment) -> None:
        """Nobody will ask for this moment again."""

    def landing(self, elements: int, dtype: torch.dtype) -> Tensor:
        """New memory that copies reach without the host's help."""

    def close(self) -> None:
        """Return when all copies are done."""


class CudaLane:
    """A stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)
        self._owner: int | None = None
        self._spare: deque[torch.cuda.Event] = deque()
        """Events to use again: making one costs more than recording it."""

    def here(self) -> Moment:
        return self._record(torch.cuda.current_stream(self._device))

    def after(self, moment: Any) -> None:
        self._enter()  # memory on the device is cleared by this thread before it is copied to
        self._stream.wait_event(moment)

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        self._enter()
        # One call, which leaves the interpreter to others while it asks for each copy.
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def reached(self) -> Moment:
        return self._record(self._stream)

    def follow(self, moment: Any) -> None:
        stream = torch.cuda.current_stream(self._device)
        if stream != self._home:  # others may use the same weights without asking again
            moment.synchronize()
        stream.wait_event(moment)

    def reuse(self, moment: Any) -> None:
        self._spare.append(moment)

    def landing(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=True)

    def close(self) -> None:
        self._stream.synchronize()

    def _enter(self) -> None:
        """Have the calling thread work on this stream: a thread's current stream is its own."""
        if self._owner is None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
            self._owner = threading.get_ident()

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # `blocking`: whoever waits for it sleeps, and leaves the core to those who have work.
        event = self._spare.popleft() if self._spare else torch.cuda.Event(blocking=True)
        event.record(stream)
        return event


class GuestLane(CudaLane):
    """One whose copies are asked for by threads that compute: they keep a stream of their own."""

    def _enter(self) -> None:
        pass

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)


@dataclass(kw_only=True)
class Staging:
    """What a worker on a device has beside its memory on the host."""

    weights: Flats
    """On the device: where its tensors read."""

    out: Lane
    back: Lane
    clock: StepClock
    pinned: "Pinned | None" = None

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a broken device, which was told before
            self.out.close()
            self.back.close()
        if self.pinned is not None:
            self.pinned.close()


class Pinned:
    """Host memory that GPUs were told of: their copies go straight there and stop nobody."""

    def __init__(self, context: Context) -> None:
        self._note = context.note
        self._addresses: list[int] = []

    def add(self, segment: Segment | None) -> None:
        """Where it cannot be, copies take longer."""
        if segment is None:
            return
        whole = torch.frombuffer(segment.memory, dtype=torch.uint8)
        driver: Any = torch.cuda.cudart()
        if int(driver.cudaHostRegister(whole.data_ptr(), whole.numel(), 0)) == 0:
            self._addresses.append(whole.data_ptr())
        else:
            self._note("the GPU cannot reach shared memory by itself: copies stop the loop.")

    def close(self) -> None:
        """Before the memory goes."""
        for address in self._addresses:
            driver: Any = torch.cuda.cudart()
            driver.cudaHostUnregister(address)
        self._addresses.clear()


def is_apart(device: torch.device) -> bool:
    """Tensors there are not in the memory that servers work in."""
    return device.type != "cpu"


def open_lane(device: torch.device) -> Lane:
    return CudaLane(device)


def open_guest_lane(device: torch.device) -> Lane:
    """For threads that compute too."""
    return GuestLane(device)


def open_staging(
    context: Context,
    device: torch.device,
    layout: Layout,
    held: Flats,
    gradients: Flats | None,
) -> Staging | None:
    """None where the worker's tensors are in main memory. `held`, `gradients`: what copies come
    from and go to."""
    if not is_apart(device):
        return None
    staging = Staging(
        weights=Flats.private(layout, device=device),
        out=open_lane(device),
        back=open_lane(device),
        clock=context.clock,
    )
    if device.type == "cuda":
        staging.pinned = Pinned(context)
        for flats in (held, gradients):
            staging.pinned.add(None if flats is None else flats.segment)
        say_who_shares(context, "servers exchange through main memory all the same")
    return staging


def check_devices(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Refuse what no lane leads to."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.device.type not in ("cpu", "cuda"):
            problem = f"{name} is on {tensor.device}, and servers work in main memory."
            raise SpecError("architecture server", problem, "use a CPU or a CUDA device.")
        if tensor.device != tensors[0].device:
            problem = f"{names[0]} is on {tensors[0].device}, and {name} on {tensor.device}."
            raise SpecError("architecture server", problem, "have the model on one device.")


def use_free_cores(plan: JobPlan, identity: Identity) -> None:
    """A seat whose workers compute on GPUs shares their host's cores with nobody who needs them.

    Called in the thread that serves: the number of threads is each thread's own.
    """
    if not plan.accelerated or plan.seat_of(identity.name) is None:
        return
    cores = len(os.sched_getaffinity(0))
    if identity.on_one_host:
        each = (cores - identity.workers) // len(plan.seats)
    else:
        each = cores // max(1, identity.local_members)
    torch.set_num_threads(max(1, min(each, MOST_SERVER_THREADS)))


def say_who_shares(context: Context, told: str) -> None:
    """Where workers of this host share a GPU; `told`: what that means."""
    identity, gpus = context.identity, torch.cuda.device_count()
    workers = min(identity.local_members, identity.workers)
    if workers > gpus:
        shared = f"{workers} workers of this host share {gpus} GPU{'s' if gpus > 1 else ''}"
        context.note(f"{shared}: {told}.")


@dataclass(kw_only=True, slots=True)
class _Asked:
    """Gradients, or anything else that is asked for."""

    request: Request = ()
    ready: Submitted = ()
    made: Moment | None = None
    """When the gradients are; None without any."""

    kept: bool = False
    """The moment is somebody else's, who will use it again."""


@dataclass(kw_only=True, slots=True)
class _Leaving:
    """Something on its way out, in the order in which it was asked for."""

    request: Request
    moment: Moment | None = None
    """When its gradients are in main memory; None where it has none."""

    sources: Submitted = ()
    """Kept until then."""

    @property
    def is_here(self) -> bool:
        return self.moment is None or self.moment.query()


class DeviceWorker(WorkerSide):
    """The worker's side where gradients and weights are on a device.

    All it asks for passes through one more thread, which has gradients copied and tells the loop of
    them when they are there: a commit must not overtake what it commits.
    """

    def __init__(self, staging: Staging, **common: Any) -> None:
        super().__init__(**common)
        self._staging, self._out, self._back = staging, staging.out, staging.back
        self._moments: dict[int, Moment] = {}
        """Chunk -> when its newest weights are on the device: nobody has waited for it yet. Those
        that came together have one moment; the newest is last."""
        self._parts: dict[int, tuple[list[tuple[int, int]], list[Tensor]]] = {}
        """Chunk -> the ranges of its newest gradient's pieces, and where in shared memory they go:
        the same in every step of most scripts."""
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        # What tells the device what to do next must not wait 5 ms for what moves messages.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._interval, SWITCH_SECONDS))
        self._thread = threading.Thread(target=self._guarded, name="paceline-copies", daemon=True)
        self._thread.start()

    # Called by the training thread.

    @property
    def idle(self) -> bool:
        return super().idle and not self._moments  # in this order: see `_is_awaited`

    def submit(self, ready: Submitted, made: Moment | None = None) -> None:
        with self._changed:
            self._pending.update(event.chunk for event, _ in ready)
        self._asked.put(_Asked(ready=ready, made=made or self._out.here(), kept=made is not None))

    def wait(self, chunks: Iterable[int]) -> float:
        """Returns at once, but for weights that have not come; the device waits for their copies.

        What it waits is told by moments in its own stream, so that no seconds are left to tell.
        """
        chunks = list(chunks)
        if self._is_awaited(chunks):
            with self._staging.clock.within("exchange_exposed"):
                super().wait(chunks)
                self._follow_copies()
        elif self.failure is not None:
            raise self.failure
        return 0.0

    def _follow_copies(self) -> None:
        """Have the device wait for all copies that have begun: a lane does them in order, so for
        the newest. Weights that are used first come last, so this is once in most steps."""
        begun = list(self._moments.items())  # at one moment: the loop may add to them
        moments = [moment for _, moment in begun]
        if begun:
            self._back.follow(moments[-1])
        for chunk, _ in begun:
            del self._moments[chunk]
        for moment in dict(zip(map(id, moments), moments, strict=True)).values():
            self._back.reuse(moment)

    def _is_awaited(self, chunks: list[int]) -> bool:
        """Whether some are not on the device yet. The loop puts down a chunk's moment before it
        takes the chunk from those pending: who looks the other way round may see neither."""
        pending = not self._pending.isdisjoint(chunks)
        return pending or not self._moments.keys().isdisjoint(chunks)

    def squared_norms(self, step: int) -> tuple[tuple[float, ...], float]:
        with self._staging.clock.within("exchange_exposed"):
            norms, _ = super().squared_norms(step)
        return norms, 0.0

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join(CLOSING_SECONDS)
        sys.setswitchinterval(self._interval)

    def _ask(self, request: Request) -> None:
        self._asked.put(_Asked(request=request))

    # Called by the loop.

    def release(self) -> None:
        if self._freed:
            there, here = self._staging.weights, self._held
            self._back.copy(
                [there.chunk(chunk) for chunk in self._freed],
                [here.chunk(chunk) for chunk in self._freed],
            )
            moment = self._back.reached()
            for chunk in self._freed:
                self._moments[chunk] = moment
        super().release()

    # The thread between them.

    def _guarded(self) -> None:
        try:
            with torch.no_grad():
                self._pass_on()
        except BaseException as error:
            self.fail(error)

    def _pass_on(self) -> None:
        """Have everything copied that is made; wait for the oldest, and tell the loop of it."""
        leaving: deque[_Leaving] = deque()
        is_over = False
        while not is_over or leaving:
            try:
                while not is_over:
                    asked = self._asked.get(block=not leaving)
                    is_over = asked is None
                    if asked is not None:
                        leaving.append(self._begin(asked))
            except Empty:
                pass
            if leaving and leaving[0].moment is not None:
                leaving[0].moment.synchronize()
            while leaving and leaving[0].is_here:
                self._tell(leaving.popleft())

    def _begin(self, asked: _Asked) -> _Leaving:
        if asked.made is None:
            return _Leaving(request=asked.request)
        self._out.after(asked.made)
        if not asked.kept:
            self._out.reuse(asked.made)
        for event, pieces in asked.ready:
            if pieces:
                self._land(event.chunk, pieces)
        request = [event for event, _ in asked.ready]
        return _Leaving(request=request, moment=self._out.reached(), sources=asked.ready)

    def _land(self, chunk: int, pieces: list[Piece]) -> None:
        """Have a chunk's gradient copied to where its transport takes it from."""
        transport, like = self.transports[chunk], self._held.chunk(chunk)
        ranges, place = [(start, stop) for start, stop, _ in pieces], transport.place(chunk)
        if place is None:
            landed = self._out.landing(like.numel(), like.dtype)
            parts = parts_of(landed, ranges)
            transport.put_gradient(chunk, [(0, landed.numel(), landed)])
        else:
            known = self._parts.get(chunk)
            if known is None or known[0] != ranges:
                known = self._parts[chunk] = ranges, parts_of(place, ranges)
            parts = known[1]
        self._out.copy(parts, [values for *_, values in pieces])

    def _tell(self, leaving: _Leaving) -> None:
        if leaving.moment is not None:
            self._out.reuse(leaving.moment)
        super()._ask(leaving.request)
