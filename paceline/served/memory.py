"""The flats of a layout as tensors: in private memory or in a shared segment."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.protocol import Chunk, Layout
from paceline.protocol.chunks import EXACT_GROUP
from paceline.wire import Segment

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Flats:
    """One tensor per flat. Pages never touched cost no memory, so each holds the whole layout."""

    def __init__(self, layout: Layout, memory: Tensor, segment: Segment | None = None) -> None:
        self.segment = segment
        self._flats: list[Tensor] = []
        start = 0
        for flat in layout.flats:
            stop = start + flat.elements * flat.element_bytes
            self._flats.append(memory[start:stop].view(DTYPES[flat.kind]))
            start = stop
        self._chunks = [self._flats[c.flat][c.start : c.stop] for c in layout.chunks]
        on_host = memory.device.type == "cpu"
        self._buffers = [as_buffer(chunk) for chunk in self._chunks] if on_host else []
        self._layout = layout

    @classmethod
    def private(
        cls, layout: Layout, *, device: torch.device | None = None, pinned: bool = False
    ) -> "Flats":
        """`pinned`: a GPU copies to and from it by itself."""
        size = Flats.size_bytes(layout)
        return cls(layout, torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned))

    @classmethod
    def shared(cls, layout: Layout, segment: Segment | None = None) -> "Flats":
        """In a new segment, or in the one given."""
        segment = segment or Segment.create(Flats.size_bytes(layout))
        memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        return cls(layout, memory[: Flats.size_bytes(layout)], segment)

    @staticmethod
    def size_bytes(layout: Layout) -> int:
        return sum(flat.elements * flat.element_bytes for flat in layout.flats)

    def chunk(self, index: int) -> Tensor:
        return self._chunks[index]

    def is_exact(self, index: int) -> bool:
        """A chunk must arrive exactly, whatever the compression."""
        return self._layout.flats[self._layout.chunks[index].flat].group == EXACT_GROUP

    def buffer(self, index: int) -> memoryview:
        """A chunk's bytes, for the wire."""
        return self._buffers[index]

    def parameter(self, index: int, like: Tensor) -> Tensor:
        """A parameter's place, seen with the shape and strides of `like`."""
        place = self._layout.places[index]
        row = self._flats[place.flat][place.start : place.stop]
        return row.as_strided(like.shape, like.stride(), row.storage_offset())

    def row(self, index: int) -> Tensor:
        """A parameter's place in shared memory, as a tensor whose storage no other tensor has."""
        assert self.segment is not None, "it is shared memory"
        place = self._layout.places[index]
        before = sum(f.elements * f.element_bytes for f in self._layout.flats[: place.flat])
        flat = self._layout.flats[place.flat]
        return torch.frombuffer(
            self.segment.memory,
            dtype=DTYPES[flat.kind],
            count=place.stop - place.start,
            offset=before + place.start * flat.element_bytes,
        )

    def clear_padding(self) -> None:
        """Zero what no parameter covers: it travels and is updated with its neighbours."""
        for number, flat in enumerate(self._flats):
            end = 0
            for place in (p for p in self._layout.places if p.flat == number):
                flat[end : place.start].zero_()
                end = place.stop
            flat[end:].zero_()

    def close(self) -> None:
        self._flats, self._chunks, self._buffers = [], [], []
        if self.segment is not None:
            self.segment.close()


Piece = tuple[int, int, Tensor]
"""Elements `start` to `stop` of a chunk, and their values."""


def pieces_of(chunk: Chunk, layout: Layout, rows: dict[int, Tensor]) -> list[Piece]:
    """A chunk's values, taken from the parameters (as rows of memory) it holds parts of."""
    pieces = []
    for index in chunk.parameters:
        place = layout.places[index]
        start, stop = max(place.start, chunk.start), min(place.stop, chunk.stop)
        if index in rows:
            part = rows[index][start - place.start : stop - place.start]
            pieces.append((start - chunk.start, stop - chunk.start, part))
    return pieces


def gather(pieces: Sequence[Piece], into: Tensor) -> Tensor:
    """Put the pieces in their places; the rest becomes zero."""
    targets = parts_of(into, [(start, stop) for start, stop, _ in pieces])
    for target, (_, _, values) in zip(targets, pieces, strict=True):
        target.copy_(values)
    return into


def parts_of(into: Tensor, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The parts that lie in these ranges, which are in order; the rest becomes zero."""
    parts, end = [], 0
    for start, stop in ranges:
        if start > end:
            into[end:start].zero_()
        parts.append(into[start:stop])
        end = stop
    if end < into.numel():
        into[end:].zero_()
    return parts


def is_dense(values: Tensor) -> bool:
    """Its elements fill one row of memory, in whatever order."""
    steps = zip(values.shape, values.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) == values.numel()


def as_row(values: Tensor, like: Tensor) -> Tensor:
    """`values` as one row of memory in the order `like` has; copied only if theirs differs."""
    if not _same_order(values, like):
        values = torch.empty_like(like, memory_format=torch.preserve_format).copy_(values)
    return values.as_strided((values.numel(),), (1,), values.storage_offset())


def _same_order(values: Tensor, like: Tensor) -> bool:
    """Equal strides, where a stride matters: along a dimension of one element it does not."""
    if values.stride() == like.stride():
        return True
    steps = zip(values.shape, values.stride(), like.stride(), strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in steps)


def as_buffer(values: Tensor) -> memoryview:
    """The bytes of a row, for the wire; keeps the tensor alive."""
    return values.view(torch.uint8).numpy().data


def from_buffer(buffer: memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype)
