"""This worker's portion of every batch of a loader with indices: only the indices are divided.

`streams` has the ways for loaders without indices; `order` says which indices a step has.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from paceline.data.sampling import split
from paceline.errors import SpecError
from paceline.session.loader.order import Drawn, Order
from paceline.session.loader.positions import Positions
from paceline.session.participants import Participants


class Portion(NamedTuple):
    """The part of one worker in one batch; if it has none, `own` is 0 and the batch a stand-in."""

    batch: Any
    own: int
    total: int
    workers: int

    @property
    def scale(self) -> float:
        """The factor of a mean gradient that makes an equal average the whole batch's mean."""
        return self.own * self.workers / self.total


class Portions(Protocol):
    """A way to divide batches."""

    @property
    def batch_size(self) -> int | None:
        """Samples of this worker in a full batch; None where batches have no fixed size."""

    @property
    def is_even(self) -> bool:
        """Return whether all workers are known to have equal parts of all batches."""

    def __len__(self) -> int:
        """Batches in one pass."""

    def reader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A plain loader that reads what this worker needs, as `loader` says."""

    def begin(self, reader: DataLoader[Any]) -> Iterator[Portion]:
        """Start a pass; like `iter(loader)`, reading begins at once."""

    def set_epoch(self, epoch: int) -> None:
        """The next pass is `epoch`."""


def division(shares: Sequence[float], participants: Participants) -> tuple[list[float], int]:
    """The shares of the workers that are there, and this worker's place among them."""
    members, usual = participants.sharing, sum(shares) / len(shares)
    there = [shares[rank] if rank < len(shares) else usual for rank in members]  # some joined later
    return there, members.index(participants.rank)


def gradient_scale(global_batch: int, shares: Sequence[float], rank: int) -> float:
    """The factor of a worker's mean gradient that makes an equal average the batch's mean."""
    own = split(global_batch, shares)[rank]
    return float((own.stop - own.start) * len(shares) / global_batch)


def own_size(total: int, shares: Sequence[float], participants: Participants) -> int:
    """Return how many samples of a full batch are this worker's."""
    there, place = division(shares, participants)
    part = split(total, there)[place]
    return int(part.stop - part.start)


def are_equal(total: int, rest: int, shares: Sequence[float]) -> bool:
    """Return whether batches of `total`, and a last one of `rest`, divide into equal parts."""
    return len(set(shares)) == 1 and total % len(shares) == 0 and rest % len(shares) == 0


def like(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A plain loader that reads as `loader` does, but for what `changes` says."""
    same = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    # in_order is left out: the n-th batch must be the n-th on every worker.
    return DataLoader(loader.dataset, **{**same, **changes})


class IndexPortions:
    """The batch sampler of a sharded loader, and the way to divide its batches.

    Iterating it gives this worker's indices, batch by batch.
    """

    def __init__(
        self,
        order: Order,
        participants: Participants,
        positions: Positions,
        shares: list[float],
        *,
        batches: Any,
        batch_size: int | None,
        is_even: bool,
    ) -> None:
        """`batches` is the batch sampler of the whole, whose attributes scripts may look at."""
        self._order, self._participants, self._shares = order, participants, shares
        self._positions = positions
        self.batch_size, self.is_even = batch_size, is_even
        self.sampler = getattr(batches, "sampler", None)
        self.drop_last = getattr(batches, "drop_last", False)
        self._next: _Draw | None = None
        self._served: _Draw | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> "_Draw":
        return self._next or self._draw()

    def set_epoch(self, epoch: int) -> None:
        """See `Portions`."""
        self._order.set_epoch(epoch)

    def reader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """See `Portions`."""
        if loader.batch_sampler is None:
            return like(loader, batch_size=None, sampler=self)
        return like(loader, batch_sampler=self)

    def begin(self, reader: DataLoader[Any]) -> Iterator[Portion]:
        """See `Portions`."""
        return _Reading(reader, self._draw(), self)

    def read(self, reader: DataLoader[Any], draw: "_Draw") -> Iterator[Any]:
        """Iterate `reader` over the indices of `draw`."""
        if reader.persistent_workers:  # the processes serve one pass at a time
            if self._served is not None and self._served is not draw:
                self._served.is_displaced = True
            self._served = draw
        self._next = draw  # torch asks this sampler for an iterator, once or twice
        try:
            return iter(reader)
        finally:
            self._next = None

    def _draw(self) -> "_Draw":
        return _Draw(self._order, self._participants, self._positions, self._shares)


class _Taken(NamedTuple):
    """A group that was divided, and among whom."""

    drawn: Drawn
    members: tuple[int, ...]
    own: int
    total: int


class _Draw(Iterator[list[Any]]):
    """This worker's indices of one pass, and how those drawn so far were divided."""

    def __init__(
        self,
        order: Order,
        participants: Participants,
        positions: Positions,
        shares: list[float],
    ) -> None:
        self._order, self._participants, self._shares = order, participants, shares
        self._positions = positions
        self._groups: Iterator[Drawn] = order.groups()
        self._taken: deque[_Taken] = deque()
        """Drawn and not yet handed over: processes that read ahead are given several."""
        self.is_displaced = False

    def __next__(self) -> list[Any]:
        drawn = next(self._groups)
        group = drawn.group
        there, place = division(self._shares, self._participants)
        together = list(chain.from_iterable(group))
        if len(group) == len(there) > 1 and len(set(there)) == 1:
            own = group[place]  # a batch for each worker, as the script's own sampler made them
        else:
            own = together[split(len(together), there)[place]]
        self._taken.append(_Taken(drawn, self._participants.sharing, len(own), len(together)))
        return own or together[:1]

    @property
    def is_stale(self) -> bool:
        """Return whether the next batch was divided among other workers than share now."""
        if not self._taken:
            problem = "another pass over a loader with persistent_workers began before this ended."
            raise SpecError(
                "shard", problem, "use persistent_workers=False for passes in parallel."
            )
        return self._taken[0].members != self._participants.sharing

    def hand_over(self, batch: Any) -> Portion:
        """`batch` is what was read for the oldest indices."""
        taken = self._taken.popleft()
        self._positions.hand_over(taken.drawn.position, self._order)
        return Portion(batch, taken.own, taken.total, len(taken.members))

    def pass_over(self) -> None:
        """Drop the next batch, which could not be read; torch's loaders continue after it."""
        if self._taken:
            self._taken.popleft()

    def divide_again(self) -> None:
        """Put back what was not handed over."""
        self._groups = chain([taken.drawn for taken in self._taken], self._groups)
        self._taken.clear()


class _Reading(Iterator[Portion]):
    """Iterates one pass over a loader with indices."""

    def __init__(self, reader: DataLoader[Any], draw: _Draw, portions: IndexPortions) -> None:
        self._reader, self._draw, self._portions = reader, draw, portions
        self._batches: Iterator[Any] | None = portions.read(reader, draw)

    def __next__(self) -> Portion:
        if self._batches is None:
            raise StopIteration
        if self._draw.is_displaced:
            problem = "another pass over a loader with persistent_workers began before this ended."
            raise SpecError(
                "shard", problem, "use persistent_workers=False for passes in parallel."
            )
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            raise
        except Exception:
            self._draw.pass_over()
            raise
        if self._draw.is_stale:  # a worker came or went after these indices were drawn
            self._draw.divide_again()
            self._batches = None  # its processes end before others are started
            with _as_if_nothing_were_drawn(self._reader):
                self._batches = self._portions.read(self._reader, self._draw)
            return next(self)
        return self._draw.hand_over(batch)


@contextmanager
def _as_if_nothing_were_drawn(reader: DataLoader[Any]) -> Iterator[None]:
    """A reader draws a seed for its processes from where the next pass draws its order: those who
    read a pass twice must have drawn no more than they would have alone."""
    generator = reader.generator or torch.default_generator
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
