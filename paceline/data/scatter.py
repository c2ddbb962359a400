"""P2's way to give workers their samples: worker 0 reads, and sends each its part, point to point.

Only worker 0 has the data set; the others learn its size and shape from a description it sends
first. Messages are tensors of known shape and one JSON text: nothing is unpickled.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from paceline.data.base import Batch, Dataset
from paceline.data.sampling import GlobalBatches
from paceline.errors import ExchangeError

READER = 0
DTYPES = {"float32": torch.float32, "int64": torch.int64}


class Sending(Protocol):
    """Something under way between two workers."""

    def wait(self) -> None: ...


class SampleGroup(Protocol):
    """What is needed of the workers as a group."""

    rank: int

    def broadcast(self, flat: Tensor) -> None:
        """Overwrite `flat` with the reader's."""

    def send(self, flat: Tensor, to: int, tag: int) -> Sending: ...

    def receive(self, flat: Tensor, source: int, tag: int) -> Sending: ...


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must know of samples it receives and never reads."""

    name: str
    num_samples: int
    num_classes: int
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    input_type: str
    shuffle: bool


def describe(dataset: Dataset | None, group: SampleGroup) -> Description:
    """Tell every worker about worker 0's data set. Called by all, once, with None on the others."""
    if group.rank != READER:
        length = torch.zeros(1, dtype=torch.int64)
        group.broadcast(length)
        text = torch.zeros(int(length), dtype=torch.uint8)
        group.broadcast(text)
        return msgspec.json.decode(text.numpy().tobytes(), type=Description)
    assert dataset is not None, "worker 0 reads, so worker 0 has the data set"
    inputs, target = dataset[0]
    description = Description(
        name=dataset.name,
        num_samples=len(dataset),
        num_classes=dataset.num_classes,
        input_shape=tuple(inputs.shape),
        target_shape=tuple(target.shape),
        input_type=str(inputs.dtype).removeprefix("torch."),
        shuffle=dataset.shuffle,
    )
    encoded = torch.frombuffer(bytearray(msgspec.json.encode(description)), dtype=torch.uint8)
    group.broadcast(torch.tensor([len(encoded)]))
    group.broadcast(encoded)
    return description


class ScatterLoader:
    """Same interface as `Loader`; called by every worker for the same steps.

    `slices` has one function per worker, from the size of a global batch to that worker's part.
    """

    def __init__(
        self,
        dataset: Dataset | None,
        description: Description,
        batches: GlobalBatches,
        slices: list[Callable[[int], slice]],
        group: SampleGroup,
    ) -> None:
        self._dataset, self._description = dataset, description
        self._batches, self._slices, self._group = batches, slices, group

    def steps(self, start: int, stop: int) -> Iterator[Batch]:
        """See `BatchSource`. The waits end at the process group's own deadline."""
        rank = self._group.rank
        for step in range(start, stop):
            yield self._read_and_send(step) if rank == READER else self._receive(step, rank)

    def _read_and_send(self, step: int) -> Batch:
        assert self._dataset is not None
        indices = self._batches.indices(step)
        whole = self._dataset.batch(indices, self._batches.epoch(step))
        pending = []
        for rank, slice_of in enumerate(self._slices):
            part = slice_of(len(indices))
            if rank != READER and part.stop > part.start:
                for tag, tensor in enumerate(whole):
                    # NHWC order travels as it lies; the receiver allocates the same order.
                    sent = _flat(tensor[part])
                    pending.append((self._group.send(sent, rank, tag), sent, rank))
        mine = self._slices[READER](len(indices))
        for work, _, rank in pending:
            _finish(work, f"worker {rank} did not take its part of step {step}")
        return whole[0][mine], whole[1][mine]

    def _receive(self, step: int, rank: int) -> Batch:
        part = self._slices[rank](len(self._batches.indices(step)))
        count, described = part.stop - part.start, self._description
        layout = torch.channels_last if len(described.input_shape) == 3 else torch.contiguous_format
        inputs = torch.empty(
            (count, *described.input_shape),
            dtype=DTYPES[described.input_type],
            memory_format=layout,
        )
        targets = torch.empty((count, *described.target_shape), dtype=torch.int64)
        if count:
            for tag, tensor in enumerate((inputs, targets)):
                work = self._group.receive(_flat(tensor), READER, tag)
                _finish(work, f"worker 0 sent no part of step {step}")
        return inputs, targets


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's memory in the order it lies, pictures with channels last."""
    if tensor.ndim == 4:
        return tensor.permute(0, 2, 3, 1).contiguous().view(-1)
    return tensor.contiguous().view(-1)


def _finish(work: Sending, complaint: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise ExchangeError(f"{complaint}: {error}") from error
