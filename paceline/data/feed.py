"""One worker's batches on their way to a GPU, ahead of need.

A thread makes the next batches, puts them into pinned memory, from where a GPU fetches by itself,
and starts the copy on a stream of its own, beside the training. `loader.Loader` is the way for a
worker that computes where the samples are.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from paceline.data.base import Batch, Dataset
from paceline.data.sampling import GlobalBatches

DEPTH = 2
"""Batches under way: one arriving, one being made."""


class _Arriving(NamedTuple):
    part: slice
    batch: Batch
    arrived: torch.cuda.Event | None


class DeviceLoader:
    """Same interface as `Loader`; batches lie on `device`.

    A set that can lie there whole does, and then nothing travels at all.
    """

    def __init__(
        self,
        dataset: Dataset,
        batches: GlobalBatches,
        slice_of: Callable[[int], slice],
        device: torch.device,
    ) -> None:
        self._dataset, self._batches, self._slice_of = dataset, batches, slice_of
        self._device = device
        self._stays = dataset.move(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def steps(self, start: int, stop: int) -> Iterator[Batch]:
        """See `BatchSource`."""
        if self._stays:
            for step in range(start, stop):
                mine = self._batches.indices(step)[self._part(step)]
                yield self._dataset.batch(mine, self._batches.epoch(step))
            return
        with ThreadPoolExecutor(1, "paceline-feed") as thread:
            coming: deque[Future[_Arriving]] = deque()
            for step in range(start, stop):
                while len(coming) < DEPTH and step + len(coming) < stop:
                    coming.append(thread.submit(self._bring, step + len(coming)))
                found = coming.popleft().result()
                if found.part != self._part(step):  # the workers divide anew: all that is stale
                    for stale in coming:
                        stale.cancel()
                    coming.clear()
                    found = thread.submit(self._bring, step).result()
                self._await(found)
                yield found.batch

    def _bring(self, step: int) -> _Arriving:
        part = self._part(step)
        mine = self._batches.indices(step)[part]
        batch = self._dataset.host_batch(mine, self._batches.epoch(step))
        if self._stream is None:
            return _Arriving(part, self._dataset.on_device(batch), None)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            inputs, targets = (
                tensor.pin_memory().to(self._device, non_blocking=True) for tensor in batch
            )
            batch = self._dataset.on_device((inputs, targets))
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        return _Arriving(part, batch, arrived)

    def _await(self, found: _Arriving) -> None:
        """The device waits, not the host; and memory of the side stream is not reused too early."""
        if found.arrived is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_event(found.arrived)
        for tensor in found.batch:
            tensor.record_stream(current)

    def _part(self, step: int) -> slice:
        return self._slice_of(len(self._batches.indices(step)))
