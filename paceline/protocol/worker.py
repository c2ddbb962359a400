"""The worker's side of an exchange: which chunk goes next, to whom, and which weights are there.

`handle(event) -> actions`, with no clock, socket or tensor. Once a step's gradients are made, the
chunks that the next forward pass needs first go first, whoever serves them: in the order in which
they were dealt, so that every seat gets its share of the link. While they are made, the newest
stretch of backward goes first, and each stretch in the order in which it was made: were the newest
chunk to go first, two workers a moment apart would send different ones, and servers would wait for
the second of each pair until the end of the step (decision 0047).

At most `window` chunks for each seat wait to depart, in all, so that an urgent chunk never queues
behind many others. The window opens when a chunk has *departed*: opened by the answer it would
deadlock, because an answer may wait for a worker that sends in another order.
"""

import heapq
import math
from collections.abc import Sequence

import msgspec

from paceline.errors import ExchangeError
from paceline.protocol.chunks import Chunk
from paceline.protocol.messages import Answer, Chosen, Declare, Push

STRETCHES = 6
"""Into so many backward is divided. More of them leave chunks that others have sent for the end,
fewer let the first layers wait; 3 to 6 were alike on ideal links."""


class Ready(msgspec.Struct, frozen=True, gc=False):
    """Event: the gradient of a chunk is made (or, `empty`, will not come this step)."""

    chunk: int
    empty: bool = False
    absent: tuple[int, ...] = ()
    hold: bool = False
    mean: bool = False


class Departed(msgspec.Struct, frozen=True, gc=False):
    """Event: the network has taken a chunk that was sent; others may follow."""

    chunk: int


class Send(msgspec.Struct, frozen=True, gc=False):
    """Action: give this message to a seat; a push goes with its gradient."""

    seat: int
    message: Push | Declare | Chosen


class Usable(msgspec.Struct, frozen=True, gc=False):
    """Action: the weights of a chunk have come; a layer that waits for them may go on."""

    chunk: int
    version: int


Event = Ready | Departed | Answer | Chosen
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
        own_seat: int | None = None,
        declares: bool = False,
    ) -> None:
        """`own_seat`: in this worker's process, where nothing has to travel. `declares`: tell the
        arbiter when a step's gradients are made (mode `quorum`)."""
        self.worker = worker
        self.step = 0
        self.late_chunks = 0
        self._declares = declares
        self._owners = tuple(owners)
        self._urgency = [chunk.first_use for chunk in chunks]
        self._versions = [0] * len(chunks)
        self._made = 0
        self._outstanding: set[int] = set()
        self._own_seat = own_seat
        self._num_seats = max(owners, default=0) + 1
        self._window = math.inf if window is None else window * self._num_seats
        self._departing = 0
        self._queue: list[tuple[int, int, Push]] = []
        """With what decides which goes next: its stretch and place in backward, or, once all are
        made, its place in the next forward pass and its number."""

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
            case Departed():
                self._departing -= 1
                return self._fill()
            case Answer():
                return self._answered(event)
        if self.worker not in event.workers:
            return []
        return [Send(seat, event) for seat in range(1, self._num_seats)]

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
            empty=event.empty,
            absent=event.absent,
            hold=event.hold,
            mean=event.mean,
        )
        self._outstanding.add(chunk)
        seat = self._owners[chunk]
        if seat == self._own_seat:
            return [Send(seat, push), *self._count_made()]
        stretch = STRETCHES * self._made // len(self._owners)
        heapq.heappush(self._queue, (-stretch, self._made, push))
        return [*self._fill(), *self._count_made()]

    def _count_made(self) -> list[Action]:
        self._made += 1
        if self._made < len(self._owners):
            return []
        self._queue = [(self._urgency[p.chunk], p.chunk, p) for _, _, p in self._queue]
        heapq.heapify(self._queue)
        declare = Declare(self.worker, self.step)
        self._made = 0
        self.step += 1
        return [Send(0, declare)] if self._declares else []

    def _answered(self, answer: Answer) -> list[Action]:
        self._outstanding.discard(answer.chunk)
        self._versions[answer.chunk] = answer.version
        self.late_chunks += answer.late
        return [Usable(answer.chunk, answer.version)]

    def _fill(self) -> list[Action]:
        """Send while the window is open."""
        actions: list[Action] = []
        while self._queue and self._departing < self._window:
            _, _, push = heapq.heappop(self._queue)
            self._departing += 1
            actions.append(Send(self._owners[push.chunk], push))
        return actions
