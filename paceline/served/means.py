"""Means over the workers, made by servers: one more collective under the buckets of gradients.

A bucket is what the servers know as a tensor: it is cut into chunks, and each chunk leaves when the
bucket is full. If members share memory, buckets lie where the servers read them, so that nothing is
copied on the way out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline import spec
from paceline.autograd.buckets import BucketSize
from paceline.collectives.context import Context
from paceline.collectives.notes import Meeting
from paceline.errors import ExchangeError
from paceline.protocol.actions import Ready
from paceline.protocol.chunks import EXACT_GROUP
from paceline.served.client import WorkerSide
from paceline.served.exchange import Exchange
from paceline.served.memory import DTYPES, Piece, pieces_of
from paceline.served.setup import share_rest
from paceline.served.shapes import Exchanged

Leaving = list[tuple[int, list[Piece]]]
"""Chunks that are complete with a bucket, and the pieces of memory that they are made of."""

Arriving = list[tuple[Tensor, Tensor]]
"""Parts of a bucket, and where the mean of each arrives."""


class ServersCollective:
    """One worker's hold on the servers that average for it. A `Collective`."""

    def __init__(self, options: spec.Server, context: Context, *, sums: bool = False) -> None:
        """`sums`: what comes is multiplied by the number of workers."""
        self._options, self._context, self._sums = options, context, sums
        self.members = tuple(range(context.identity.workers))
        self.weight = float(len(self.members)) if sums else 1.0
        self.counts_equally = not context.identity.goes_on
        """Where others go on, servers divide by the weights of those who are left."""
        self._opening = self._num_broadcasts = self._steps = self._started = 0
        self._exchange: Exchange | None = None
        self._flats: list[Tensor] = []
        self._parts: list[tuple[int, ...]] = []
        """For each bucket, the numbers of the exchanged tensors that it consists of."""
        self._chunks: list[list[int]] = []
        """For each bucket, the chunks that hold parts of it."""
        self._leaving: list[Leaving] = []
        self._arriving: list[Arriving] = []

    @property
    def summed(self) -> int:
        return len(self.members)

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None, "buckets were dealt"
        return self._exchange

    @property
    def _worker(self) -> WorkerSide:
        return self.exchange.worker

    def broadcast(self, flat: Tensor) -> None:
        """Overwrite `flat` with worker 0's, or later with that of the worker that leads."""
        number, self._num_broadcasts = self._num_broadcasts, self._num_broadcasts + 1
        rank, key = self._context.identity.rank, f"broadcast{number}"
        if self._exchange is not None:
            lost = self._worker.lost if self._context.identity.goes_on else None
            share_rest([flat], self.exchange.meeting, rank, key, self.exchange.leader, lost)
        elif str(flat.dtype).removeprefix("torch.") not in DTYPES:
            share_rest([flat], Meeting(self._context), rank, key)
        else:
            self._open([flat], [0], updates=True)  # which gives every worker worker 0's
            self._close_opening()

    def allocate(self, sizes: Sequence[BucketSize]) -> list[Tensor]:
        """Make memory for buckets, and begin an exchange of them."""
        flats = [torch.empty(s.elements, dtype=s.dtype, device=s.device) for s in sizes]
        if self._options.compression == "none":
            self._begin(flats, [(number,) for number in range(len(flats))])
            for number in range(len(flats)):  # in place: the exchange has the same list
                flats[number] = self.exchange.sent_from(number)
        else:
            self._begin_exactly(flats, [size.marks for size in sizes])
        for flat, size in zip(flats, sizes, strict=True):
            flat[size.elements - size.marks :].zero_()
        self._cut(flats)
        return flats

    def deal(self, flats: Sequence[Tensor]) -> None:
        """Exchange these from here on, in this order."""
        self._begin(flats, [(number,) for number in range(len(flats))])
        self._cut(flats)

    def start(self, flat: Tensor) -> None:
        """Send the next bucket; its mean takes its place in `finish`."""
        number, self._started = self._started, self._started + 1
        if flat.data_ptr() != self._flats[number].data_ptr():  # the script keeps the memory it had
            self._cut([*self._flats[:number], flat, *self._flats[number + 1 :]])
        weight = self._context.training.weight()
        ready = [
            (Ready(chunk, mean=True, weight=weight), pieces)
            for chunk, pieces in self._leaving[number]
        ]
        if ready:
            self._worker.submit(ready)

    def finish(self) -> None:
        """Wait for every mean of this step, and have each where its bucket lies."""
        waited = 0.0
        for chunks, arriving in zip(self._chunks, self._arriving, strict=True):
            waited += self._worker.wait(chunks)
            for part, mean in arriving:
                if self._sums:
                    torch.mul(mean, self.weight, out=part)
                else:
                    part.copy_(mean)
        self._started = 0
        self._steps += 1
        self._context.clock.charge("exchange_exposed", waited)

    def take_note(self) -> None:
        """Take note of workers that came or went; called between two steps."""
        self.exchange.greet(self._steps)

    def counters(self) -> dict[str, object]:
        return self._exchange.counters() if self._exchange is not None else {}

    def close(self, *, failed: bool = False) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close(failed=failed)

    def _begin_exactly(self, flats: Sequence[Tensor], marks: Sequence[int]) -> None:
        """Begin an exchange in which the last elements of each bucket, its `marks`, arrive exactly:
        they are a tensor of their own."""
        tensors = [
            part
            for flat, count in zip(flats, marks, strict=True)
            for part in flat.split([flat.numel() - count, count])
        ]
        parts = [(2 * number, 2 * number + 1) for number in range(len(flats))]
        self._begin(tensors, parts, [0, EXACT_GROUP] * len(flats))

    def _begin(
        self,
        tensors: Sequence[Tensor],
        parts: Sequence[tuple[int, ...]],
        groups: Sequence[int] = (),
    ) -> None:
        """Begin an exchange of these. `parts`: the numbers of those that make up each bucket."""
        if self._exchange is not None:
            self._refuse_changed_members(self._exchange)
            self._close_opening()
        self._open(tensors, groups or [0] * len(tensors), updates=False)
        self._parts, self._steps, self._started = list(parts), 0, 0

    def _cut(self, flats: Sequence[Tensor]) -> None:
        """Find which chunks are complete with each bucket, once for all steps."""
        layout, exchange = self.exchange.layout, self.exchange
        rows: dict[int, Tensor] = {}
        bucket_of: dict[int, int] = {}
        self._arriving = []
        for number, (flat, parts) in enumerate(zip(flats, self._parts, strict=True)):
            sizes = [layout.parameters[part].elements for part in parts]
            pairs = list(zip(flat.split(sizes), parts, strict=True))
            rows |= {part: row for row, part in pairs}
            bucket_of |= dict.fromkeys(parts, number)
            self._arriving.append([(row, exchange.view(part)) for row, part in pairs])
        self._flats, self._leaving = list(flats), [[] for _ in flats]
        self._chunks = [[] for _ in flats]
        for chunk in layout.chunks:
            buckets = {bucket_of[part] for part in chunk.parameters}
            self._leaving[max(buckets)].append((chunk.index, pieces_of(chunk, layout, rows)))
            for number in buckets:
                self._chunks[number].append(chunk.index)

    def _open(self, tensors: Sequence[Tensor], groups: Sequence[int], *, updates: bool) -> None:
        exchanged = Exchanged(
            names=[f"bucket{number}" for number in range(len(tensors))],
            tensors=tensors,
            groups=groups,
            optimizer="",
            settings=[],
        )
        options = self._options.changed(update="server" if updates else "worker")
        self._exchange = Exchange(options, self._context, exchanged, self._opening)

    def _close_opening(self) -> None:
        self.exchange.close(failed=False, again=True)
        self._exchange, self._opening = None, self._opening + 1

    def _refuse_changed_members(self, exchange: Exchange) -> None:
        workers = [f"worker{rank}" for rank in sorted(exchange.worker.lost)]
        if lost := [*exchange.lost_servers, *workers]:
            failed = " and ".join(lost)
            raise ExchangeError(
                f"the script trains other tensors than before, and {failed} failed."
            )
