"""Samples of any shape, made once: the workload without the cost of reading."""

import math

import numpy as np
import torch

from paceline.data.base import Batch, Dataset, Request, numbers_on
from paceline.data.sampling import Indices
from paceline.errors import SpecError

NUM_SAMPLES = 50_000
POOL_BYTES = 8 << 20
"""Memory for distinct samples; beyond it, sample i is sample i modulo their number."""


class Synthetic(Dataset):
    """Normal noise (or random token ids) with random classes.

    Behind the pool its first samples follow once more, as many as a batch takes: so any run of
    consecutive samples is a view, and a step costs nothing.
    """

    name = "synthetic"
    shuffle = False

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        num_samples: int = NUM_SAMPLES,
        tokens: bool = False,
        seed: int = 0,
    ) -> None:
        if min(input_shape, default=0) < 1 or num_classes < 1 or num_samples < 1:
            problem = (
                f"{num_samples} samples of {input_shape} in {num_classes} classes are no data."
            )
            raise SpecError("data synthetic", problem, "write numbers above zero.")
        self.input_shape, self.num_classes = input_shape, num_classes
        self._num_samples = num_samples
        pool = min(num_samples, max(1, POOL_BYTES // (4 * math.prod(input_shape))))
        generator = torch.Generator().manual_seed(seed)
        if tokens:
            inputs = torch.randint(num_classes, (pool, *input_shape), generator=generator)
            targets = inputs.roll(-1, dims=1)
        else:
            inputs = torch.randn(pool, *input_shape, generator=generator)
            targets = torch.randint(num_classes, (pool,), generator=generator)
        self._layout = torch.channels_last if len(input_shape) == 3 else torch.contiguous_format
        self._inputs = inputs.contiguous(memory_format=self._layout)
        self._targets, self._pool = targets, pool

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        count = len(indices)
        places = indices % self._pool
        if not count or not bool((np.diff(indices) == 1).all()):
            chosen = numbers_on(self._inputs.device, places)
            return self._inputs[chosen], self._targets[chosen]
        if self._pool + count > len(self._inputs):
            self._extend(self._pool + count)
        run = slice(places[0], places[0] + count)
        return self._inputs[run], self._targets[run]

    def move(self, device: torch.device) -> bool:
        self._inputs, self._targets = self._inputs.to(device), self._targets.to(device)
        return True

    def _extend(self, count: int) -> None:
        """Let so many samples follow one another, the pool's again and again."""
        whole, rest = divmod(count, self._pool)
        pools = self._inputs[: self._pool], self._targets[: self._pool]
        inputs, targets = (torch.cat([*[pool] * whole, pool[:rest]]) for pool in pools)
        self._inputs, self._targets = inputs.contiguous(memory_format=self._layout), targets


def load(request: Request) -> Dataset:
    """Make the samples; train and test parts differ."""
    return Synthetic(
        input_shape=request.input_shape or (3, 32, 32),
        num_classes=request.num_classes or 10,
        num_samples=request.num_samples or NUM_SAMPLES,
        tokens=request.tokens,
        seed=2 * request.seed + (0 if request.train else 1),
    )
