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

    cache: bool = False
    """Keep what was decoded."""


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

    def host_batch(self, indices: Indices, epoch: int = 0) -> Batch:
        """What travels to a device: as few bytes as possible; `on_device` makes the batch of it."""
        return self.batch(indices, epoch)

    def on_device(self, batch: Batch) -> Batch:
        """Called with a `host_batch` that has arrived; what is left to compute is done there."""
        return batch

    def move(self, device: torch.device) -> bool:
        """Keep the samples on `device` from now on, so that batches come from there.

        False, and nothing changes, where they are too many or made one by one.
        """
        return False

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
        chosen = numbers_on(self._rows.device, indices)
        return self._rows[chosen], self._labels[chosen]

    def move(self, device: torch.device) -> bool:
        if not fits(device, self._rows):
            return False
        self._rows, self._labels = self._rows.to(device), self._labels.to(device)
        return True


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
        chosen = numbers_on(self._pictures.device, indices)
        return self._normalise(self._pictures[chosen]), self._labels[chosen]

    def move(self, device: torch.device) -> bool:
        if not fits(device, self._pictures):
            return False
        self._pictures, self._labels = self._pictures.to(device), self._labels.to(device)
        return True


class Normaliser:
    """Bytes with channels last -> float32 (number, channels, height, width), mean 0, deviation 1.

    `mean` and `deviation` are per channel, of values scaled to 0-1.
    """

    def __init__(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        self._scale = 1 / (255 * torch.tensor(deviation))
        self._shift = -torch.tensor(mean) / torch.tensor(deviation)

    def __call__(self, pictures: Tensor) -> Tensor:
        if self._scale.device != pictures.device:
            self._scale, self._shift = (
                self._scale.to(pictures.device),
                self._shift.to(pictures.device),
            )
        values = pictures.to(torch.float32).mul_(self._scale).add_(self._shift)
        return values.permute(0, 3, 1, 2)


def fits(device: torch.device, samples: Tensor) -> bool:
    """Whether a set may lie on `device` whole: a GPU with four times the room to spare."""
    if device.type != "cuda":
        return False
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return samples.numel() * samples.element_size() * 4 <= free_bytes


def numbers_on(device: torch.device, indices: Indices) -> Tensor:
    """Sample numbers where the samples lie, without stopping for the device."""
    numbers = torch.from_numpy(indices)
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


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
