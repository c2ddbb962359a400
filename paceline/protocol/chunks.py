"""How parameters are cut into chunks, the unit that travels, is summed and is updated.

Parameters of one optimizer group and one kind of number lie one behind the other in a *flat*, in
the order the forward pass uses them; a chunk is a range of a flat. A large parameter spans many
chunks, many small ones share one. No torch here: a parameter is its name and its size.
"""

import math
from collections.abc import Sequence

import msgspec

ALIGNMENT_BYTES = 64
"""Every parameter starts on a cache line, so that vector instructions read whole lines."""


EXACT_GROUP = -1
"""Group of what must arrive exactly: it is never compressed."""


class ParameterSize(msgspec.Struct, frozen=True, kw_only=True):
    """All the protocol needs to know of a parameter; listed in the order of first use."""

    name: str
    elements: int
    element_bytes: int = 4
    kind: str = "float32"
    group: int = 0
    """The optimizer's parameter group: chunks never straddle groups."""

    @property
    def size_bytes(self) -> int:
        return self.elements * self.element_bytes


class Flat(msgspec.Struct, frozen=True, kw_only=True):
    """A run of memory that holds all parameters of one group and kind."""

    group: int
    kind: str
    elements: int
    element_bytes: int


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a parameter lies."""

    flat: int
    start: int
    stop: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Elements `start` to `stop` of a flat."""

    index: int
    flat: int
    start: int
    stop: int
    size_bytes: int
    first_use: int
    """Place in the forward pass of the first parameter it holds a part of."""

    parameters: tuple[int, ...]
    """Which parameters it holds a part of."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where every parameter lies and how the flats are cut."""

    parameters: tuple[ParameterSize, ...]
    flats: tuple[Flat, ...]
    places: tuple[Place, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)


def cut(parameters: Sequence[ParameterSize], chunk_bytes: int) -> Layout:
    """Lay the parameters into flats and cut these into chunks of at most about `chunk_bytes`."""
    kinds = list(dict.fromkeys((p.group, p.kind, p.element_bytes) for p in parameters))
    ends = [0] * len(kinds)
    places: list[Place] = []
    for parameter in parameters:
        kind = kinds.index((parameter.group, parameter.kind, parameter.element_bytes))
        start = _aligned(ends[kind], parameter.element_bytes)
        ends[kind] = start + parameter.elements
        places.append(Place(flat=kind, start=start, stop=ends[kind]))
    flats = tuple(
        Flat(group=group, kind=name, elements=_aligned(end, size), element_bytes=size)
        for (group, name, size), end in zip(kinds, ends, strict=True)
    )
    ranges: list[tuple[int, int, int]] = []
    for index, flat in enumerate(flats):
        inside = [place for place in places if place.flat == index]
        ranges += [(index, *span) for span in _cut_flat(inside, flat, chunk_bytes)]
    chunks = [_chunk(*span, flats, places) for span in ranges]
    chunks.sort(key=lambda chunk: (chunk.first_use, chunk.flat, chunk.start))
    numbered = tuple(msgspec.structs.replace(c, index=i) for i, c in enumerate(chunks))
    return Layout(parameters=tuple(parameters), flats=flats, places=tuple(places), chunks=numbered)


def _cut_flat(places: list[Place], flat: Flat, chunk_bytes: int) -> list[tuple[int, int]]:
    """Gather parameters until there is a chunk's worth, then cut what was gathered evenly.

    So a bias travels with its neighbour and not in a message of its own, and a chunk never joins
    layers that lie far apart.
    """
    spans: list[tuple[int, int]] = []
    start = 0
    for place, following in zip(places, [*places[1:], None], strict=True):
        stop = following.start if following else flat.elements
        gathered_bytes = (stop - start) * flat.element_bytes
        if (gathered_bytes >= chunk_bytes or following is None) and place.stop > start:
            parts = math.ceil(gathered_bytes / chunk_bytes)
            length = _aligned(math.ceil((stop - start) / parts), flat.element_bytes)
            spans += [(at, min(at + length, stop)) for at in range(start, stop, length)]
            start = stop
    return spans


def _chunk(
    flat: int, start: int, stop: int, flats: Sequence[Flat], places: Sequence[Place]
) -> Chunk:
    inside = tuple(
        index
        for index, place in enumerate(places)
        if place.flat == flat and place.start < stop and place.stop > start
    )
    return Chunk(
        index=-1,
        flat=flat,
        start=start,
        stop=stop,
        size_bytes=(stop - start) * flats[flat].element_bytes,
        first_use=min(inside),
        parameters=inside,
    )


def _aligned(elements: int, element_bytes: int) -> int:
    step = max(1, ALIGNMENT_BYTES // element_bytes)
    return math.ceil(elements / step) * step
