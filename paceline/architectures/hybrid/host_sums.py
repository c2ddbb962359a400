"""Gradients of a host's workers, summed in memory that all see: what `hybrid` does inside a host.

What happens when is decided by `HybridMachine`; the messages between its members are flags in the
shared memory. Nobody has a thread for this: whoever brings a bucket also hears what the others have
told meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.architectures.hybrid.host_stage import HostStage
from paceline.collectives.collective import TorchCollective
from paceline.collectives.context import Context
from paceline.collectives.group import ended_early, look_at
from paceline.collectives.notes import Meeting
from paceline.collectives.polling import pause
from paceline.errors import DeadlineError
from paceline.protocol.actions import AllReduce, Event, Send, Usable
from paceline.protocol.collectives import (
    Brought,
    HybridMachine,
    Made,
    Reduced,
    Stretched,
    Summed,
    SumShared,
    SumStretch,
)
from paceline.protocol.messages import Message
from paceline.served.client import Moment
from paceline.wire import Segment, Ticket

LOOK_SECONDS = 0.5
"""How often a worker that waits looks whether another has ended."""

Flags = NDArray[np.int64]
"""In shared memory: each says for which step (from 1) something was last done."""


class Between(Protocol):
    """Sums over the leaders."""

    def deal(self, flats: Sequence[Tensor]) -> None:
        """These are what each step sums from here on, in this order."""

    def start(self, flat: Tensor) -> None:
        """Begin to replace the next of them by its sum; nobody touches it meanwhile."""

    def finish(self) -> None:
        """Wait until every sum of this step is there."""

    def close(self) -> None: ...


Joins = Callable[[], Between | None]
"""None where there is one host."""


class Everyone(Protocol):
    """All workers of all these hosts."""

    def broadcast(self, flat: Tensor) -> None: ...

    def start(self, flat: Tensor) -> None: ...

    def finish(self) -> None: ...


class HostCollective:
    """A `Collective` of all workers: sums inside the host, then over the leaders."""

    counts_equally = True
    is_outdated = False
    """Buckets would have to be dealt anew; `ViewHosts` has to."""

    def __init__(
        self,
        context: Context,
        meeting: Meeting,
        hosts: Sequence[Sequence[int]],
        between: Joins,
        everyone: Everyone | None = None,
    ) -> None:
        """`hosts`: the workers of each; `between` joins this one to other leaders, if it leads;
        `everyone`: all of these workers, where they have met already."""
        identity = context.identity
        self._context, self._meeting, self._hosts = context, meeting, hosts
        self._mates = next(mates for mates in self._hosts if identity.rank in mates)
        self._place = self._mates.index(identity.rank)
        self.members = tuple(sorted(rank for mates in hosts for rank in mates))
        self.summed, self.weight = len(self.members), float(len(self.members))
        self._everyone = everyone or TorchCollective(context, "gloo")  # for the first weights
        self._join: Joins | None = between if self._leads else None
        self._between: Between | None = None
        self._own: list[Segment] = []
        self._sizes: list[tuple[int, torch.dtype]] = []
        self._attached: list[Segment] = []
        self._sums: list[Tensor] = []
        self._gradients: list[list[Tensor]] = []
        self._stage = HostStage(context)
        self._on_device: list[Tensor | None] = []
        """Buckets that are not in the host's memory themselves."""
        self._leaving: deque[tuple[int, Moment | None]] = deque()
        """Buckets that were filled, and when they are in the host's memory."""
        self._arrived = self._summed = self._shared = _no_flags()
        self._ears: list[_Ear] = []
        self._machine = HybridMachine(identity.rank, self._hosts, 0)
        self._started = self._steps = 0
        """Buckets of this step that were brought; steps that are over, of these buckets."""
        self._reducing: list[int] = []
        """Buckets on their way between hosts."""
        self._deals = self._summed_bytes = 0
        self._looked_after = 0.0

    @property
    def _leads(self) -> bool:
        return self._place == 0

    def allocate_bucket(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for this worker's gradients that the others of its host can read."""
        segment = Segment.create(elements * dtype.itemsize)
        self._own.append(segment)
        self._sizes.append((elements, dtype))
        self._on_device.append(self._stage.bucket(elements, dtype, device))
        flat = self._on_device[-1]
        return _view(segment, elements, dtype) if flat is None else flat

    def forget(self) -> None:
        """Other buckets will take the place of these."""
        self._close_memory()
        self._deals += 1

    def connect(self) -> None:
        """Called when every bucket has its memory: find the others'."""
        rank, num_buckets = self._context.identity.rank, len(self._sizes)
        self._meeting.leave(f"{self._prefix}/buckets/{rank}", [s.ticket for s in self._own])
        if self._leads:
            sums = [Segment.create(count * kind.itemsize) for count, kind in self._sizes]
            board = Segment.create(8 * num_buckets * (2 * len(self._mates) + 1))
            self._attached += [*sums, board]
            self._meeting.leave(f"{self._prefix}/sums/{rank}", [s.ticket for s in (*sums, board)])
        else:
            *sums, board = self._attach(f"{self._prefix}/sums/{self._mates[0]}", self._mates[0])
        self._sums = self._views(sums)
        if self._join is not None:
            self._between, self._join = self._join(), None
        if self._between is not None:
            self._between.deal(self._sums)
        self._lay_out(np.frombuffer(board.memory, dtype=np.int64), num_buckets)
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
        for segment in (*self._own, *sums):
            self._stage.pin(segment)

    def _lay_out(self, board: Flags, buckets: int) -> None:
        """Whose flags say what, and which of them this member listens to."""
        mates, rank = len(self._mates), self._context.identity.rank
        flags = board[: buckets * (2 * mates + 1)].reshape(2 * mates + 1, buckets)
        self._arrived, self._summed, self._shared = flags[:mates], flags[mates:-1], flags[-1]
        others = [(place, mate) for place, mate in enumerate(self._mates) if mate != rank]
        self._ears = [_Ear(self._arrived[place], partial(Brought, mate)) for place, mate in others]
        self._ears += [_Ear(self._summed[place], partial(Summed, mate)) for place, mate in others]
        if not self._leads and len(self._hosts) > 1:
            self._ears.append(_Ear(self._shared, SumShared))
        self._machine = HybridMachine(rank, self._hosts, buckets)
        self._started = self._steps = 0

    @property
    def _prefix(self) -> str:
        return f"hybrid/{self._deals}"

    def broadcast(self, flat: Tensor) -> None:
        self._everyone.broadcast(flat)

    def start(self, flat: Tensor) -> None:
        """The next bucket of this step is full; `flat` is the memory `allocate_bucket` gave."""
        bucket, self._started = self._started, self._started + 1
        moment = None
        if (on_device := self._on_device[bucket]) is not None:
            moment = self._stage.leave(on_device, self._gradients[self._place][bucket])
        self._leaving.append((bucket, moment))
        self._listen()

    def finish(self) -> None:
        began = heard = time.monotonic()
        self._looked_after = 0.0
        while self._machine.step == self._steps:
            if len(self._reducing) == len(self._sizes) and self._between is not None:
                self._between.finish()
                reduced, self._reducing = self._reducing, []
                for bucket in reduced:
                    self._tell(Reduced(bucket))
            elif self._listen():
                heard = time.monotonic()
            else:
                self._wait(began, heard)
        self._stage.follow()
        self._steps += 1
        self._started = 0
        self._summed_bytes += sum(count * kind.itemsize for count, kind in self._sizes)
        for ear in self._ears:
            ear.heard = 0

    def _listen(self) -> bool:
        """Tell the machine what has arrived, and what others have done since; False where that is
        nothing."""
        has_heard = False
        while self._leaving and _is_here(self._leaving[0][1]):
            bucket, moment = self._leaving.popleft()
            on_device = self._on_device[bucket]
            if on_device is not None and moment is not None:
                self._stage.arrived(on_device, moment)
            self._tell(Made(bucket))
            has_heard = True
        for ear in self._ears:
            while self._machine.step == self._steps and ear.has_news(self._steps):
                ear.heard += 1
                self._tell(ear.says(ear.heard - 1, self._steps))
                has_heard = True
        return has_heard

    def _tell(self, event: Message | Event) -> None:
        """Do what the machine decides; what it sends is a flag that the others look at."""
        actions = deque(self._machine.handle(event))
        while actions:
            match actions.popleft():
                case Send(_, Brought(_, bucket, step)):
                    self._arrived[self._place, bucket] = step + 1
                case Send(_, Summed(_, bucket, step)):
                    self._summed[self._place, bucket] = step + 1
                case Send(_, SumShared(bucket, step)):
                    self._shared[bucket] = step + 1
                case SumStretch(bucket, place, places):
                    self._sum(bucket, place, places)
                    actions.extend(self._machine.handle(Stretched(bucket)))
                case AllReduce(bucket):
                    assert self._between is not None, "it leads one of several hosts"
                    self._between.start(self._sums[bucket])
                    self._reducing.append(bucket)
                case Usable(bucket):
                    self._hand_over(bucket)

    def _hand_over(self, bucket: int) -> None:
        """A bucket's sum, to where it was filled."""
        on_device = self._on_device[bucket]
        if on_device is None:
            self._gradients[self._place][bucket].copy_(self._sums[bucket])
        else:
            self._stage.bring(on_device, self._sums[bucket])

    def counters(self) -> dict[str, object]:
        """What this worker sends to other hosts, beside what a ring of all workers would have it.

        In that ring a worker sends to the next rank, which may be on its own host.
        """
        size_bytes, hosts, workers = self._summed_bytes, len(self._hosts), len(self.members)
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
        self._stage.close()

    def _close_memory(self) -> None:
        self._stage.settle()
        self._sums, self._gradients, self._on_device = [], [], []
        self._arrived = self._summed = self._shared = _no_flags()  # they are views of it too
        self._ears = []
        for segment in (*self._own, *self._attached):
            segment.close()
        self._own, self._attached, self._sizes = [], [], []

    def _sum(self, bucket: int, place: int, places: int) -> None:
        """One stretch of a bucket, over the members of the host."""
        elements = self._sizes[bucket][0]
        stretch = slice(elements * place // places, elements * (place + 1) // places)
        total = self._sums[bucket][stretch]
        parts = [gradients[bucket][stretch] for gradients in self._gradients]
        if places == 1:
            total.copy_(parts[0])
            return
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total.add_(part)

    def _wait(self, began: float, heard: float) -> None:
        """`heard`: when somebody was last heard of; the next may follow at once."""
        now, views = time.monotonic(), self._context.views
        waited_seconds = now - began
        if views is not None:
            look_at(views, self._context)
        if waited_seconds > self._context.deadline_seconds:
            operation = f"sum inside host {self._context.identity.host}, step {self._steps}"
            missing = [f"worker{rank}" for rank in self._machine.missing]
            raise DeadlineError(operation, self._context.deadline_seconds, missing)
        if views is None and waited_seconds > self._looked_after + LOOK_SECONDS:
            self._looked_after = waited_seconds
            if ended := self._context.membership.ended():
                raise ended_early(ended, self._context.identity.name)
        pause(now - heard)

    def _attach(self, key: str, author: int) -> list[Segment]:
        tickets = self._meeting.read(key, list[Ticket], f"worker{author}")
        segments = [Segment.attach(ticket) for ticket in tickets]
        self._attached += segments
        return segments

    def _views(self, segments: Sequence[Segment]) -> list[Tensor]:
        return [_view(s, *size) for s, size in zip(segments, self._sizes, strict=True)]


class _Ear:
    """Flags of one member, bucket by bucket, and how many of this step were heard."""

    def __init__(self, flags: Flags, says: Callable[[int, int], Message]) -> None:
        self.flags, self.says = flags, says
        self.heard = 0

    def has_news(self, step: int) -> bool:
        """Flags rise in the order of the buckets."""
        return self.heard < len(self.flags) and bool(self.flags[self.heard] > step)


def _is_here(moment: Moment | None) -> bool:
    return moment is None or moment.query()


def _no_flags() -> Flags:
    return np.zeros((0, 0), dtype=np.int64)


def _view(segment: Segment, elements: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(segment.memory, dtype=dtype, count=elements)
