"""`hybrid`: gradients are summed inside each host through shared memory, between hosts by leaders.

The members of a host (those whose identity names the same one) lay their gradients into memory they
all see; each sums its own stretch of every bucket. The first member leads: it alone exchanges the
host's sums with the other leaders, by `ring` (gloo) or through servers, so that what crosses the
network does not grow with the members of a host. Nobody has a thread for this: whoever brings a
bucket also does what has become possible meanwhile.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline import spec
from paceline.architectures.base import Context
from paceline.architectures.buckets import Bucket, BucketedArchitecture
from paceline.architectures.collective import TorchCollective
from paceline.architectures.group import ended_early
from paceline.architectures.server import serve as serve_leaders
from paceline.architectures.server.exchange.opening import Exchange
from paceline.architectures.server.exchange.plan import Exchanged
from paceline.architectures.server.exchange.setup import Meeting
from paceline.errors import DeadlineError, SpecError
from paceline.launch import Identity
from paceline.wire import Segment, Ticket

BUCKET_BYTES = 4 << 20
"""Small enough that summing starts early in backward, large enough that flags cost nothing."""

SPIN_SECONDS, POLL_SECONDS = 0.2e-3, 50e-6
LOOK_SECONDS = 0.5
"""How often a worker that waits looks whether another has ended."""

Flags = NDArray[np.int64]
"""In shared memory: each says for which step (from 1) something was last done."""


class HybridArchitecture(BucketedArchitecture):
    """Shared memory inside a host, one leader per host outside."""

    def __init__(self, options: spec.Hybrid, context: Context) -> None:
        if context.device.type != "cpu":
            problem = f"gradients are on {context.device.type}, and a host's memory sums them."
            raise SpecError("architecture hybrid", problem, "use ring: NCCL knows hosts itself.")
        self._sums = HostCollective(options, context)
        allocate = self._sums.allocate_bucket
        super().__init__(self._sums, context, bucket_bytes=BUCKET_BYTES, allocate=allocate)

    def _deal(self) -> None:
        """Buckets lie in memory that the host shares: made, then found by the others."""
        self._sums.forget()
        super()._deal()
        self._sums.connect()

    def _part_with(self, bucket: Bucket) -> None:
        """Its memory is known to others: what the script holds on to gets memory of its own."""
        for slot in bucket.slots:
            mean = slot.given
            if mean is not None and not slot.has_mean:
                mean.data = mean.clone()
        if bucket.is_held_on_to():
            problem = "the script holds on to views of gradients of an earlier step."
            raise SpecError("architecture hybrid", problem, "keep copies: parameter.grad.clone().")

    def counters(self) -> dict[str, object]:
        return self._sums.counters()


def serve(options: spec.Hybrid, context: Context) -> dict[str, object]:
    """A server member: to it the leaders are the workers."""
    if options.between != "server":
        context.note(f"{context.identity.name} has nothing to do: between = ring needs no servers.")
        return {}
    hosts = _members_by_host(Meeting(context), context.identity)
    if len(hosts) == 1:
        context.note(f"{context.identity.name} has nothing to do: all workers share one host.")
        return {}
    return serve_leaders(_server_options(context), _among_leaders(context, hosts))


class Between(Protocol):
    """Sums over the leaders."""

    def deal(self, flats: Sequence[Tensor]) -> None:
        """These are what each step sums from here on, in this order."""

    def start(self, flat: Tensor) -> None:
        """Begin to replace the next of them by its sum; nobody touches it meanwhile."""

    def finish(self) -> None:
        """Wait until every sum of this step is there."""

    def close(self) -> None: ...


class HostCollective:
    """A `Collective` of all workers: sums inside the host, then over the leaders."""

    def __init__(self, options: spec.Hybrid, context: Context) -> None:
        identity = context.identity
        self._context, self._meeting = context, Meeting(context)
        self._meeting.leave(f"hybrid/host/{identity.rank}", identity.host)
        self._hosts = _members_by_host(self._meeting, identity)
        self._mates = next(mates for mates in self._hosts if identity.rank in mates)
        self._place = self._mates.index(identity.rank)
        self.members = tuple(range(identity.workers))
        self.summed, self.weight = identity.workers, float(identity.workers)
        self._everyone = TorchCollective(context, "gloo")  # for the first weights
        self._between = self._join_leaders(options)
        self._own: list[Segment] = []
        self._sizes: list[tuple[int, torch.dtype]] = []
        self._attached: list[Segment] = []
        self._sums: list[Tensor] = []
        self._gradients: list[list[Tensor]] = []
        self._arrived: Flags = np.zeros(0, dtype=np.int64)
        self._summed: Flags = np.zeros(0, dtype=np.int64)
        self._done: Flags = np.zeros(1, dtype=np.int64)
        self._step = self._num_started = self._num_summed = self._num_sent = 0
        self._deals = 0
        self._looked_after = 0.0

    @property
    def _leads(self) -> bool:
        return self._place == 0

    def allocate_bucket(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for this worker's gradients that the others of its host can read."""
        segment = Segment.create(elements * dtype.itemsize)
        self._own.append(segment)
        self._sizes.append((elements, dtype))
        return _view(segment, elements, dtype)

    def forget(self) -> None:
        """Other buckets will take the place of these."""
        self._close_memory()
        self._step = 0
        self._deals += 1

    def connect(self) -> None:
        """Called when every bucket has its memory: find the others'."""
        rank, num_buckets = self._context.identity.rank, len(self._sizes)
        self._meeting.leave(f"{self._prefix}/buckets/{rank}", [s.ticket for s in self._own])
        if self._leads:
            sums = [Segment.create(count * kind.itemsize) for count, kind in self._sizes]
            board = Segment.create(8 * (2 * len(self._mates) * num_buckets + 1))
            self._attached += [*sums, board]
            self._meeting.leave(f"{self._prefix}/sums/{rank}", [s.ticket for s in (*sums, board)])
        else:
            *sums, board = self._attach(f"{self._prefix}/sums/{self._mates[0]}", self._mates[0])
        self._sums = self._views(sums)
        if self._between is not None:
            self._between.deal(self._sums)
        flags = np.frombuffer(board.memory, dtype=np.int64)
        half = len(self._mates) * num_buckets
        self._arrived = flags[:half].reshape(num_buckets, len(self._mates))
        self._summed = flags[half : 2 * half].reshape(num_buckets, len(self._mates))
        self._done = flags[2 * half : 2 * half + 1]
        self._gradients = [
            self._views(
                self._own if mate == rank else self._attach(f"{self._prefix}/buckets/{mate}", mate)
            )
            for mate in self._mates
        ]
        self._everyone.start(torch.zeros(1))
        self._everyone.finish()  # everyone has attached: the tickets end
        for segment in (*self._own, *self._attached):
            segment.withdraw()

    @property
    def _prefix(self) -> str:
        return f"hybrid/{self._deals}"

    def broadcast(self, flat: Tensor) -> None:
        self._everyone.broadcast(flat)

    def start(self, flat: Tensor) -> None:
        """The next bucket of this step is full; `flat` is the memory `allocate_bucket` gave."""
        self._arrived[self._num_started, self._place] = self._step + 1
        self._num_started += 1
        self._advance()

    def finish(self) -> None:
        began, self._looked_after = time.monotonic(), 0.0
        while not self._advance():
            self._wait(began)
        if self._leads:
            if self._between is not None:
                self._between.finish()
            self._done[0] = self._step + 1
        while self._done[0] <= self._step:
            self._wait(began)
        for own, total in zip(self._gradients[self._place], self._sums, strict=True):
            own.copy_(total)
        self._step += 1
        self._num_started = self._num_summed = self._num_sent = 0

    def counters(self) -> dict[str, object]:
        """What this worker sends to other hosts, beside what a ring of all workers would have it.

        In that ring a worker sends to the next rank, which may be on its own host.
        """
        size_bytes = self._step * sum(count * kind.itemsize for count, kind in self._sizes)
        hosts, workers = len(self._hosts), len(self.members)
        next_rank = (self._context.identity.rank + 1) % workers
        by_ring = 2 * (workers - 1) / workers * size_bytes * (next_rank not in self._mates)
        between = 2 * (hosts - 1) / hosts * size_bytes * self._leads
        counted: dict[str, object] = {"hosts": hosts, "members_of_host": len(self._mates)}
        return counted | {
            "exchanged_bytes_between_hosts": round(between),
            "exchanged_bytes_between_hosts_by_ring": round(by_ring),
        }

    def close(self) -> None:
        if self._between is not None:
            self._between.close()
        self._close_memory()

    def _close_memory(self) -> None:
        self._sums, self._gradients = [], []
        self._arrived = self._summed = self._arrived[:0].copy()  # flags are views of the memory too
        self._done = self._done.copy()
        for segment in (*self._own, *self._attached):
            segment.close()
        self._own, self._attached, self._sizes = [], [], []

    def _advance(self) -> bool:
        """Do what can be done now, bucket by bucket; True when nothing of this step is left."""
        step, num_buckets = self._step, len(self._sizes)
        while self._num_summed < self._num_started and _all(self._arrived[self._num_summed], step):
            self._sum_own_stretch(self._num_summed)
            self._summed[self._num_summed, self._place] = step + 1
            self._num_summed += 1
        if self._leads:
            while self._num_sent < self._num_summed and _all(self._summed[self._num_sent], step):
                if self._between is not None:
                    self._between.start(self._sums[self._num_sent])
                self._num_sent += 1
            return self._num_sent == num_buckets
        return self._num_summed == num_buckets

    def _sum_own_stretch(self, bucket: int) -> None:
        elements, count = self._sizes[bucket][0], len(self._mates)
        stretch = slice(elements * self._place // count, elements * (self._place + 1) // count)
        total = self._sums[bucket][stretch]
        parts = [gradients[bucket][stretch] for gradients in self._gradients]
        if count == 1:
            total.copy_(parts[0])
            return
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total.add_(part)

    def _wait(self, began: float) -> None:
        waited_seconds = time.monotonic() - began
        if waited_seconds > self._context.deadline_seconds:
            raise self._late()
        if waited_seconds > self._looked_after + LOOK_SECONDS:
            self._looked_after = waited_seconds
            if ended := self._context.ended():
                raise ended_early(ended, self._context.identity.name)
        time.sleep(0.0 if waited_seconds < SPIN_SECONDS else POLL_SECONDS)

    def _late(self) -> DeadlineError:
        """The flags say who has not brought its gradients, or else not summed its stretch."""
        late = self._behind(self._arrived) or self._behind(self._summed) or [self._mates[0]]
        missing = [f"worker{rank}" for rank in late]
        operation = f"sum inside host {self._context.identity.host}, step {self._step}"
        return DeadlineError(operation, self._context.deadline_seconds, missing)

    def _behind(self, flags: Flags) -> list[int]:
        places = enumerate(self._mates)
        return [mate for place, mate in places if not _all(flags[:, place], self._step)]

    def _join_leaders(self, options: spec.Hybrid) -> Between | None:
        if len(self._hosts) == 1:
            return None
        if options.between == "ring":
            leaders = [mates[0] for mates in self._hosts]
            return RingSums(self._context, "gloo", leaders) if self._leads else None
        if not self._leads:
            return None
        among = _among_leaders(self._context, self._hosts)
        return ServedSums(_server_options(self._context), among)

    def _attach(self, key: str, author: int) -> list[Segment]:
        tickets = self._meeting.read(key, list[Ticket], f"worker{author}")
        segments = [Segment.attach(ticket) for ticket in tickets]
        self._attached += segments
        return segments

    def _views(self, segments: Sequence[Segment]) -> list[Tensor]:
        return [_view(s, *size) for s, size in zip(segments, self._sizes, strict=True)]


class RingSums(TorchCollective):
    """Sums over the leaders by gloo."""

    def deal(self, flats: Sequence[Tensor]) -> None:
        pass


class ServedSums:
    """Sums over the leaders by servers: to them a leader is a worker.

    A bucket leaves when its host has summed it, in backward; its mean is waited for at the end.
    """

    def __init__(self, options: spec.Server, context: Context) -> None:
        self._options, self._context = options, context
        self._num_leaders = context.identity.workers
        self._started: list[Tensor] = []
        self._exchange: Exchange | None = None
        self._generation = 0

    def deal(self, flats: Sequence[Tensor]) -> None:
        if self._exchange is not None:
            self._exchange.close(failed=False, again=True)
            self._generation += 1
        exchanged = Exchanged(
            names=[f"bucket{number}" for number in range(len(flats))],
            tensors=[torch.zeros_like(flat) for flat in flats],
            groups=[0] * len(flats),
            optimizer="",
            settings=[],
        )
        self._exchange = Exchange(self._options, self._context, exchanged, self._generation)

    def start(self, flat: Tensor) -> None:
        assert self._exchange is not None
        self._exchange.cutter.take(len(self._started), flat, mean=True)
        self._started.append(flat)

    def finish(self) -> None:
        assert self._exchange is not None
        started, self._started = self._started, []
        for flat, mean in zip(started, self._exchange.means(copied=False)[1], strict=True):
            assert mean is not None
            torch.mul(mean, self._num_leaders, out=flat)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close(failed=False)


def _members_by_host(meeting: Meeting, identity: Identity) -> list[list[int]]:
    """The workers of each host, in order of rank; the first of each leads."""
    by_host: dict[str, list[int]] = {}
    for rank in range(identity.workers):
        host = meeting.read(f"hybrid/host/{rank}", str, f"worker{rank}")
        by_host.setdefault(host, []).append(rank)
    return list(by_host.values())


def _among_leaders(context: Context, hosts: Sequence[Sequence[int]]) -> Context:
    """The job as leaders and servers see it: one worker per host."""
    identity = context.identity
    index = len(hosts) + identity.rank
    if identity.role == "worker":
        index = next(number for number, mates in enumerate(hosts) if identity.rank in mates)
    reduced = msgspec.structs.replace(
        identity, index=index, workers=len(hosts), local_index=0, local_members=1
    )
    return replace(context, identity=reduced)


def _server_options(context: Context) -> spec.Server:
    dedicated = context.identity.servers > 0
    return spec.Server(update="worker", placement="dedicated" if dedicated else "colocated")


def _all(flags: Flags, step: int) -> bool:
    return bool((flags > step).all())


def _view(segment: Segment, elements: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(segment.memory, dtype=dtype, count=elements)
