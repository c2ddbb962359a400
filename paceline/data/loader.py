"""One worker's batches, step by step: its part of every global batch, read by itself.

`scatter.ScatterLoader` is the other way, where worker 0 reads for all.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from paceline.data.base import Batch, Dataset
from paceline.data.sampling import GlobalBatches


class BatchSource(Protocol):
    """What the training loop needs to know of a loader."""

    def steps(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield this worker's part of the steps `start` to `stop` - 1, in order.

        Closing the iterator ends whatever it runs in the background.
        """


class Loader:
    """Every worker reads its own part.

    With `prefetch` (by default for sets that call themselves costly) a thread makes the next batch
    while this one is trained on: one ahead, never more.
    """

    def __init__(
        self,
        dataset: Dataset,
        batches: GlobalBatches,
        slice_of: Callable[[int], slice],
        *,
        prefetch: bool | None = None,
    ) -> None:
        self._dataset, self._batches, self._slice_of = dataset, batches, slice_of
        self._prefetch = dataset.costly if prefetch is None else prefetch

    def steps(self, start: int, stop: int) -> Iterator[Batch]:
        """See `BatchSource`."""
        if not self._prefetch:
            for step in range(start, stop):
                yield self.load(step)
            return
        with ThreadPoolExecutor(1, "paceline-prefetch") as thread:
            coming = thread.submit(self._load, start) if start < stop else None
            for step in range(start, stop):
                assert coming is not None
                part, batch = coming.result()
                if part != self._part(step):  # a worker was lost since, and the rest divides anew
                    _, batch = self._load(step)
                if step + 1 < stop:
                    coming = thread.submit(self._load, step + 1)
                yield batch

    def load(self, step: int) -> Batch:
        """This worker's part of one step."""
        return self._load(step)[1]

    def _load(self, step: int) -> tuple[slice, Batch]:
        part = self._part(step)
        mine = self._batches.indices(step)[part]
        return part, self._dataset.batch(mine, self._batches.epoch(step))

    def _part(self, step: int) -> slice:
        return self._slice_of(len(self._batches.indices(step)))
