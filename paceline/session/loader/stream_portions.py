"""This worker's portion of loaders without indices to divide: streams, and ready-made batches.

A stream (`IterableDataset`) is read by every worker, and the samples of a batch are divided before
they are put together. Ready-made batches (`batch_size=None`) are read by every worker and cut along
their first dimension, or dealt out whole.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import DataLoader

from paceline.data.sampling import split
from paceline.errors import SpecError
from paceline.session.loader.order import Order
from paceline.session.loader.portions import Portion, are_equal, division, like, own_size
from paceline.session.participants import Participants
from paceline.session.shared_values import SharedValues

MARKED_SAMPLES = 8
"""Number of samples of a pass that workers compare."""


class _Cut(NamedTuple):
    """The result of a reading process for one batch of the stream."""

    portion: Portion
    mark: int


class _Cutter:
    """Divides the samples of a batch and puts this worker's together; runs in reading processes."""

    def __init__(self, collate: Callable[[Any], Any], shares: list[float], place: int) -> None:
        self._collate, self._shares, self._place = collate, shares, place

    def __call__(self, samples: list[Any]) -> _Cut:
        own = samples[split(len(samples), self._shares)[self._place]]
        batch = self._collate(own or samples[:1])
        portion = Portion(batch, len(own), len(samples), len(self._shares))
        return _Cut(portion, mark(samples[:MARKED_SAMPLES]) if len(self._shares) > 1 else 0)


class StreamPortions:
    """Batches of a stream that every worker reads whole."""

    def __init__(
        self,
        loader: DataLoader[Any],
        name: str,
        participants: Participants,
        values: SharedValues,
        shares: list[float],
        total: int,
    ) -> None:
        self._dataset, self._drop_last = loader.dataset, loader.drop_last
        self._participants, self._values = participants, values
        self._shares, self._total, self._name = shares, total, name
        self._passes = 0
        self.batch_size = own_size(total, shares, participants)
        self.is_even = loader.drop_last and are_equal(total, 0, shares)

    def __len__(self) -> int:
        samples = len(self._dataset)  # type: ignore[arg-type]
        return samples // self._total if self._drop_last else -(-samples // self._total)

    def set_epoch(self, epoch: int) -> None:
        """A stream decides its order itself."""

    def reader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """See `Portions`. The workers that share now divide the whole pass."""
        cutter = _Cutter(loader.collate_fn, *division(self._shares, self._participants))
        return like(loader, batch_size=self._total, drop_last=self._drop_last, collate_fn=cutter)

    def begin(self, reader: DataLoader[Any]) -> Iterator[Portion]:
        """See `Portions`."""
        return self._compare(iter(reader))

    def _compare(self, cuts: Iterator[_Cut]) -> Iterator[Portion]:
        number, self._passes = self._passes, self._passes + 1
        first = next(cuts, None)
        own_mark = "" if first is None else str(first.mark)
        if self._values.agree(f"{self._name}/{number}", own_mark) != own_mark:
            problem = (
                f"the stream of worker {self._participants.rank} has other samples than worker 0's."
            )
            fix = (
                "let the data set give every worker the same stream (seed it alike), of which "
                "shard takes a part; one that divides itself by rank needs no shard."
            )
            raise SpecError("shard", problem, fix)
        if first is not None:
            yield first.portion
        for cut in cuts:
            yield cut.portion


class ReadyPortions:
    """Batches that the data set itself makes.

    `deal`: every worker takes a whole one of as many as there are workers; else each is cut.
    """

    batch_size = None

    def __init__(
        self,
        loader: DataLoader[Any],
        participants: Participants,
        shares: list[float],
        order: Order | None,
        deal: bool,
    ) -> None:
        self._dataset, self._participants, self._shares = loader.dataset, participants, shares
        self._order, self._deal = order, deal
        self.is_even = participants.workers == 1

    def __len__(self) -> int:
        batches = len(self._dataset if self._order is None else self._order)  # type: ignore[arg-type]
        return -(-batches // self._participants.workers) if self._deal else batches

    def __iter__(self) -> Iterator[Any]:
        """Yield every index, on every worker, as a sampler does."""
        assert self._order is not None, "a stream has no indices"
        for _, ((index,),) in self._order.groups():
            yield index

    def set_epoch(self, epoch: int) -> None:
        """See `Portions`."""
        if self._order is not None:
            self._order.set_epoch(epoch)

    def reader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """See `Portions`."""
        by = {} if self._order is None else {"sampler": self}
        return like(loader, batch_size=None, **by)

    def begin(self, reader: DataLoader[Any]) -> Iterator[Portion]:
        """See `Portions`."""
        batches = iter(reader)
        return self._dealt(batches) if self._deal else map(self._cut, batches)

    def _dealt(self, batches: Iterator[Any]) -> Iterator[Portion]:
        while hand := list(islice(batches, len(self._participants.sharing))):
            sizes = [size_of(batch) for batch in hand]
            place = self._participants.sharing.index(self._participants.rank)
            own, size = (hand[place], sizes[place]) if place < len(hand) else (hand[0], 0)
            yield Portion(own, size, sum(sizes), len(self._participants.sharing))

    def _cut(self, batch: Any) -> Portion:
        there, place = division(self._shares, self._participants)
        total = size_of(batch)
        part = split(total, there)[place]
        own = part.stop - part.start
        return Portion(take(batch, part if own else slice(0, 1), total), own, total, len(there))


def size_of(batch: Any) -> int:
    """Return the samples of a ready-made batch: the first dimension of all its tensors."""
    sizes = {len(leaf) for leaf in _leaves(batch) if _has_samples(leaf)}
    if len(sizes) != 1 or 0 in sizes:
        found = f"first dimensions {sorted(sizes)}" if sizes else "no tensor in it"
        problem = f"a ready-made batch (batch_size=None) of type {type(batch).__name__}: {found}."
        fix = (
            "yield tensors of one length in tuples, lists or dicts, or give the loader a batch "
            "size and let it put samples together."
        )
        raise SpecError("shard", problem, fix)
    return sizes.pop()


def take(batch: Any, part: slice, total: int) -> Any:
    """The samples `part` of a ready-made batch of `total`, in the batch's own structure."""
    if _has_samples(batch):
        return batch[part]
    if isinstance(batch, Mapping):
        taken = {key: take(value, part, total) for key, value in batch.items()}
        return taken if type(batch) is dict else type(batch)(taken)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(take(value, part, total) for value in batch))
    if isinstance(batch, list) and len(batch) == total and all(isinstance(v, str) for v in batch):
        return batch[part]
    if isinstance(batch, list | tuple):
        return type(batch)(take(value, part, total) for value in batch)
    return batch


def mark(samples: Any) -> int:
    """A number that differs between different samples.

    Labels, tokens and names decide where there are any: what is drawn at random on each worker
    (an augmented picture) may differ though the sample is the same.
    """
    leaves = list(_leaves(samples))
    firm = [leaf for leaf in leaves if _is_firm(leaf)]
    number = len(samples)
    for leaf in firm or leaves:
        number = crc32(_bytes(leaf), number)
    return number


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _is_firm(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype in (torch.int32, torch.int64)
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype in (np.int32, np.int64)
    return isinstance(leaf, int | str | bytes)


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.tobytes()
    is_plain = isinstance(leaf, int | float | str | bytes)
    return repr(leaf).encode() if is_plain else type(leaf).__name__.encode()
