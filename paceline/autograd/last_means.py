"""The means of the last pass, for workers that did not get them before another one failed.

Means stay where they are until the next pass is averaged (buckets lie elsewhere meanwhile), and a
worker that lacks them is handed them as long as the script has not changed them in an unknown way.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.autograd.buckets import Bucket, GradientSlot


class LastMeans:
    """Where they are, and whether they are clipped. Empty where no worker can lack them."""

    def __init__(self) -> None:
        self._flats: list[tuple[Tensor, int]] = []
        """The memory of each bucket, and its version when its means were handed out."""
        self._is_clipped = self._expected = torch.zeros(1)
        self._came_clipped = False

    def expect(self) -> Tensor:
        """Return what is handed over in addition to means: 1 where they are clipped already."""
        self._expected = torch.zeros(1)
        return self._expected

    def arrive(self) -> None:
        """Means have come, summed or handed over by another worker."""
        self._is_clipped, self._came_clipped = self._expected, bool(self._expected)

    def lie_in(self, buckets: Sequence[Bucket]) -> None:
        self._flats = [(bucket.flat, bucket.flat._version) for bucket in buckets]

    def intact(self, slots: Iterable[GradientSlot]) -> list[Tensor] | None:
        """Return the means, and whether they are clipped. None if the script has changed them."""
        intact = all(flat._version == version for flat, version in self._flats)
        intact = intact and not any(slot.is_held for slot in slots)
        return [*(flat for flat, _ in self._flats), self._is_clipped] if intact else None

    def take_clipped(self) -> bool:
        """Whether they came clipped; asked once."""
        came, self._came_clipped = self._came_clipped, False
        return came

    @contextmanager
    def being_clipped(self, slots: Iterable[GradientSlot]) -> Iterator[None]:
        """They are clipped inside: a change that is known."""
        were_kept = bool(self._flats) and self.intact(slots) is not None
        yield
        if were_kept:
            self._is_clipped.fill_(1)
            self._flats = [(flat, flat._version) for flat, _ in self._flats]
