"""The worker's side of an exchange: which chunk goes next, to whom, and which weights are there.

`handle(event) -> actions`, with no clock, socket or tensor. Chunks that the next forward pass needs
first go first. At most `window` chunks are under way to one server without a receipt, so that an
urgent chunk never queues behind many others; a seat with a smaller share has a smaller window,
because a link divides itself by what is under way on it. The window opens on *receipt*: opened by
the answer it would deadlock, because an answer may wait for a worker that sends in another order.
"""

import heapq
from collections.abc import Sequence

import msgspec

from paceline.errors import ExchangeError
from paceline.protocol.chunks import Chunk
from paceline.protocol.messages import Answer, Chosen, Declare, Push, Receipt


class Ready(msgspec.Struct, frozen=True, gc=False):
    """Event: the gradient of a chunk is made (or, `empty`, will not come this step)."""

    chunk: int
    samples: float = 1.0
    empty: bool = False
    absent: tuple[int, ...] = ()
    hold: bool = False


class Send(msgspec.Struct, frozen=True, gc=False):
    """Action: give this message to a seat; a push goes with its gradient."""

    seat: int
    message: Push | Declare | Chosen


class Usable(msgspec.Struct, frozen=True, gc=False):
    """Action: the weights of a chunk have come; a layer that waits for them may go on."""

    chunk: int
    version: int


Event = Ready | Receipt | Answer | Chosen
Action = Send | Usable


class WorkerMachine:
    """One worker's view of all chunks."""

    def __init__(
        self,
        worker: int,
        chunks: Sequence[Chunk],
        owners: Sequence[int],
        *,
        window: int | None = None,
        declares: bool = False,
    ) -> None:
        """`declares`: tell the arbiter when a step's gradients are made (mode `quorum`)."""
        self.worker = worker
        self.step = 0
        self.late_chunks = 0
        self._declares = declares
        self._owners = tuple(owners)
        self._urgency = [chunk.first_use for chunk in chunks]
        self._versions = [0] * len(chunks)
        self._made = 0
        self._outstanding: set[int] = set()
        self._windows = None if window is None else _windows(window, chunks, owners)
        self._unreceived: list[set[int]] = [set() for _ in range(max(owners, default=0) + 1)]
        self._queues: list[list[tuple[int, int, Push]]] = [[] for _ in self._unreceived]

    @property
    def outstanding(self) -> frozenset[int]:
        """Chunks whose gradient was made and whose answer has not come."""
        return frozenset(self._outstanding)

    def version(self, chunk: int) -> int:
        """How many updates the weights at hand have seen."""
        return self._versions[chunk]

    def reorder(self, first_use: Sequence[int]) -> None:
        """Take the order of use seen in a real forward pass in place of the guessed one."""
        self._urgency = list(first_use)

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Ready():
                return self._ready(event)
            case Receipt():
                return self._received(event.chunk)
            case Answer():
                return self._answered(event)
        if self.worker not in event.workers:
            return []
        return [Send(seat, event) for seat in range(1, len(self._queues))]

    def _ready(self, event: Ready) -> list[Action]:
        chunk = event.chunk
        if chunk in self._outstanding:
            raise ExchangeError(
                f"chunk {chunk} has two gradients in step {self.step}; "
                "call backward once per step, or all but the last time inside no_sync()."
            )
        if self._made == 0 and self._declares:
            self.step = min(self._versions)
        push = Push(
            worker=self.worker,
            chunk=chunk,
            step=self.step,
            version=self._versions[chunk],
            samples=event.samples,
            empty=event.empty,
            absent=event.absent,
            hold=event.hold,
        )
        self._outstanding.add(chunk)
        seat = self._owners[chunk]
        heapq.heappush(self._queues[seat], (self._urgency[chunk], chunk, push))
        return [*self._fill(seat), *self._count_made()]

    def _count_made(self) -> list[Action]:
        self._made += 1
        if self._made < len(self._owners):
            return []
        declare = Declare(self.worker, self.step)
        self._made = 0
        self.step += 1
        return [Send(0, declare)] if self._declares else []

    def _received(self, chunk: int) -> list[Action]:
        seat = self._owners[chunk]
        self._unreceived[seat].discard(chunk)
        return self._fill(seat)

    def _answered(self, answer: Answer) -> list[Action]:
        self._outstanding.discard(answer.chunk)
        self._versions[answer.chunk] = answer.version
        self.late_chunks += answer.late
        # An answer says that the push was received, should the receipt still be on its way.
        return [Usable(answer.chunk, answer.version), *self._received(answer.chunk)]

    def _fill(self, seat: int) -> list[Action]:
        """Send to `seat` while its window is open, the most urgent chunk first."""
        queue, unreceived = self._queues[seat], self._unreceived[seat]
        actions: list[Action] = []
        while queue and (self._windows is None or len(unreceived) < self._windows[seat]):
            _, chunk, push = heapq.heappop(queue)
            if self._windows is not None:
                unreceived.add(chunk)
            actions.append(Send(seat, push))
        return actions


def _windows(largest: int, chunks: Sequence[Chunk], owners: Sequence[int]) -> list[int]:
    """The window of each seat, in proportion to the bytes it carries."""
    loads = [0] * (max(owners, default=0) + 1)
    for chunk, owner in zip(chunks, owners, strict=True):
        loads[owner] += chunk.size_bytes
    return [max(1, round(largest * load / max(loads))) for load in loads]
