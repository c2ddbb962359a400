"""What every data set offers, and the two kinds held in memory: pictures and rows of numbers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.sampling import Indices

Batch = tuple[Tensor, Tensor]
"""Inputs, and the class of each (or the next token at each place)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for; each data set takes from it what applies to it."""

    data_dir: Path | None = None
    train: bool = True
    seed: int = 0

    input_shape: tuple[int, ...] | None = None
    """Shape of one sample, for the sets that can have any."""

    num_classes: int | None = None
    num_samples: int | None = None
    tokens: bool = False
    """Synthetic samples are token ids instead of numbers."""


class Dataset(ABC):
    """Samples by number. The training loop asks for batches; torch's DataLoader works too."""

    name: str
    input_shape: tuple[int, ...]
    num_classes: int

    costly: bool = False
    """Whether making a batch takes long enough to be worth a thread of its own."""

    shuffle: bool = True
    """Whether another order each epoch means anything; synthetic samples are all alike."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        """Return the samples of `indices`, in order.

        The same for the same (indices, epoch) in every process, random crops included.
        """

    def __getitem__(self, index: int) -> Batch:
        inputs, targets = self.batch(np.array([index]))
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Torch's DataLoader calls this, when it exists, with a whole batch."""
        inputs, targets = self.batch(np.asarray(indices))
        return list(zip(inputs, targets, strict=True))

    def close(self) -> None:  # noqa: B027 - a set in memory has nothing to let go of
        """Let go of threads and files."""


class Rows(Dataset):
    """Rows of float32 features, normalised already."""

    def __init__(
        self, name: str, rows: NDArray[np.float32], labels: NDArray[np.int64], num_classes: int
    ) -> None:
        self.name, self.num_classes, self.input_shape = name, num_classes, rows.shape[1:]
        self._rows, self._labels = torch.from_numpy(rows), torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        chosen = torch.from_numpy(indices)
        return self._rows[chosen], self._labels[chosen]


class Pictures(Dataset):
    """Pictures kept as bytes, (number, height, width, channels), normalised batch by batch.

    Bytes take a quarter of the memory of floats, in every worker; channels come last because that
    is the order in which convolutions are fastest, so batches need no reordering.
    """

    def __init__(
        self,
        name: str,
        pictures: NDArray[np.uint8],
        labels: NDArray[np.int64],
        *,
        num_classes: int,
        mean: Sequence[float],
        deviation: Sequence[float],
    ) -> None:
        self.name, self.num_classes = name, num_classes
        height, width, channels = pictures.shape[1:]
        self.input_shape = (channels, height, width)
        self._pictures, self._labels = torch.from_numpy(pictures), torch.from_numpy(labels)
        self._normalise = Normaliser(mean, deviation)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        chosen = torch.from_numpy(indices)
        return self._normalise(self._pictures[chosen]), self._labels[chosen]


class Normaliser:
    """Bytes with channels last -> float32 (number, channels, height, width), mean 0, deviation 1.

    `mean` and `deviation` are per channel, of values scaled to 0-1.
    """

    def __init__(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        self._scale = 1 / (255 * torch.tensor(deviation))
        self._shift = -torch.tensor(mean) / torch.tensor(deviation)

    def __call__(self, pictures: Tensor) -> Tensor:
        values = pictures.to(torch.float32).mul_(self._scale).add_(self._shift)
        return values.permute(0, 3, 1, 2)


def standardise(
    rows: NDArray[np.float32], like: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Shift and scale each column to mean 0 and deviation 1, as measured on `like` (else `rows`).

    A column that never varies is only shifted.
    """
    measured = rows if like is None else like
    mean, deviation = measured.mean(axis=0), measured.std(axis=0)
    scaled: NDArray[np.float32] = (rows - mean) / np.where(deviation > 0, deviation, 1)
    return scaled.astype(np.float32)
