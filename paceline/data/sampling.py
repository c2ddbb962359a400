"""Which samples make up which step, and which of them are whose. Numbers only: no torch, no files.

The global batch of step i depends on the seed and on i alone, never on the number of workers; each
worker takes a contiguous part of it.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SpecError

Indices = NDArray[np.int64]


class GlobalBatches:
    """The samples of every step, of all workers together.

    Each epoch is a new permutation drawn from (seed, epoch). What does not fill a last batch is
    left out of that epoch, unless `keep_last`: evaluation wants every sample, and one short batch
    does not hurt it.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        keep_last: bool = False,
    ) -> None:
        if not 1 <= global_batch <= num_samples and not (keep_last and global_batch >= 1):
            problem = f"a global batch of {global_batch} from {num_samples} samples is impossible."
            fix = f"take 1 to {num_samples} samples per step over all workers."
            raise SpecError("batch", problem, fix)
        self.num_samples, self.global_batch = num_samples, global_batch
        self.seed, self.shuffle, self.keep_last = seed, shuffle, keep_last
        self._order = lru_cache(maxsize=1)(self._draw_order)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the data (and the short last one with `keep_last`)."""
        if self.keep_last:
            return math.ceil(self.num_samples / self.global_batch)
        return self.num_samples // self.global_batch

    def epoch(self, step: int) -> int:
        """The pass over the data, from 0, that `step` belongs to."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> Indices:
        """Samples of `step` in order. Any step may be asked for: resuming is nothing special."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch
        if not self.shuffle:
            return np.arange(start, min(start + self.global_batch, self.num_samples))
        return self._order(epoch)[start : start + self.global_batch]

    def _draw_order(self, epoch: int) -> Indices:
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)


def split(count: int, shares: Sequence[float]) -> list[slice]:
    """Cut `count` samples into one contiguous slice per share, in proportion to the shares.

    Every sample falls in exactly one slice. Rounding goes to the largest remainders, to the first
    of equal ones, so that equal shares differ by one sample at most.
    """
    total = math.fsum(shares)
    if not shares or min(shares) < 0 or not 0 < total < math.inf:
        problem = f"shares {list(shares)} do not divide a batch."
        raise SpecError("shares", problem, "write one number per worker, none below 0, not all 0.")
    exact = [count * share / total for share in shares]
    sizes = [math.floor(size) for size in exact]
    by_remainder = sorted(range(len(shares)), key=lambda worker: sizes[worker] - exact[worker])
    for worker in by_remainder[: count - sum(sizes)]:
        sizes[worker] += 1
    stops = np.cumsum(sizes).tolist()
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def part_of(worker: int, shares: Sequence[float]) -> Callable[[int], slice]:
    """Return the function that maps the size of a global batch to `worker`'s slice of it."""
    return lambda count: split(count, shares)[worker]
