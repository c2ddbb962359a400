"""What travels to whom: chunks and their seats, as a stack deals them, and how alike ones collapse.

Our own stack is dealt by the protocol itself. TensorFlow deals whole variables, MXNet whole arrays
with the large ones cut evenly over all servers.
"""

from collections.abc import Sequence

import msgspec

from paceline import protocol
from paceline.predict.stacks import Stack
from paceline.protocol import Chunk, ParameterSize
from paceline.protocol.plan import TRAVELLING_CHUNK_BYTES

LARGE_ARRAY_BYTES = 4_000_000
"""MXNET_KVSTORE_BIGARRAY_BOUND: a million numbers."""

HOT = 1.25
"""A seat that carries so many times the mean is looked at by itself."""

MOST_HOT = 2


class Lot(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk, or several that behave alike and are simulated as one."""

    chunk: Chunk
    owner: int
    layers: tuple[int, ...]
    messages: float = 1.0
    """How many real messages it stands for."""


def deal(
    names: Sequence[str],
    sizes_bytes: Sequence[int],
    shares: Sequence[float],
    stack: Stack,
    wanted_bytes: int | None,
    fewest_bytes: int = 0,
) -> list[Lot]:
    """Every chunk with its seat. `fewest_bytes`: no chunk of ours is smaller, to simulate fewer."""
    if stack.place == "chunks":
        return _chunks(names, sizes_bytes, shares, wanted_bytes, fewest_bytes)
    pieces: list[tuple[int, int, int]] = []
    loads = [0.0] * len(shares)
    for layer, size in enumerate(sizes_bytes):
        if stack.place == "arrays" and size > LARGE_ARRAY_BYTES:
            part = size // len(shares)
            pieces += [(layer, seat, part) for seat in range(len(shares))]
            continue
        seat = min(range(len(shares)), key=lambda s: (loads[s], s))
        loads[seat] += size
        pieces.append((layer, seat, size))
    return [
        Lot(chunk=_chunk(index, layer, size), owner=seat, layers=(layer,))
        for index, (layer, seat, size) in enumerate(pieces)
    ]


def _chunk(index: int, layer: int, size_bytes: int) -> Chunk:
    return Chunk(
        index=index,
        flat=0,
        start=0,
        stop=size_bytes // 4,
        size_bytes=size_bytes,
        first_use=layer,
        parameters=(layer,),
    )


def _chunks(
    names: Sequence[str],
    sizes_bytes: Sequence[int],
    shares: Sequence[float],
    wanted_bytes: int | None,
    fewest_bytes: int,
) -> list[Lot]:
    sizes = [
        ParameterSize(name=name, elements=max(1, size // 4))
        for name, size in zip(names, sizes_bytes, strict=True)
    ]
    preferred, least = TRAVELLING_CHUNK_BYTES if wanted_bytes is None else (wanted_bytes,) * 2
    real = preferred
    preferred, least = max(preferred, fewest_bytes), max(least, fewest_bytes)
    layout, owners = protocol.cut_and_deal(sizes, shares, preferred, least)
    return [
        Lot(
            chunk=chunk,
            owner=owner,
            layers=chunk.parameters,
            messages=max(1.0, chunk.size_bytes / real),
        )
        for chunk, owner in zip(layout.chunks, owners, strict=True)
    ]


def hot_seats(lots: Sequence[Lot], num_seats: int) -> list[int]:
    """Seats that carry much more than the others, the fullest first."""
    loads = [0.0] * num_seats
    for lot in lots:
        loads[lot.owner] += lot.chunk.size_bytes
    mean = sum(loads) / num_seats
    order = sorted(range(num_seats), key=lambda seat: -loads[seat])
    return [seat for seat in order[:MOST_HOT] if loads[seat] > HOT * mean]


def merge(
    lots: Sequence[Lot],
    group_of: Sequence[int],
    layer_seconds: Sequence[float],
    stretches: int,
) -> list[Lot]:
    """Chunks of neighbouring layers with seats of one group become one.

    The network is divided into stretches of as much time and bytes together; no chunk spans two.
    """
    total_bytes = sum(lot.chunk.size_bytes for lot in lots)
    total_seconds = sum(layer_seconds)
    before = [sum(layer_seconds[:layer]) / total_seconds for layer in range(len(layer_seconds))]
    ordered = sorted(lots, key=lambda lot: (lot.chunk.first_use, lot.chunk.index))
    gathered: dict[tuple[int, int], list[Lot]] = {}
    seen = 0
    for lot in ordered:
        done = (seen / total_bytes + before[lot.chunk.first_use]) / 2
        stretch = min(stretches - 1, int(stretches * done))
        seen += lot.chunk.size_bytes
        gathered.setdefault((stretch, group_of[lot.owner]), []).append(lot)
    merged = []
    for index, ((_, group), alike) in enumerate(sorted(gathered.items())):
        layers = tuple(sorted({layer for lot in alike for layer in lot.layers}))
        size = sum(lot.chunk.size_bytes for lot in alike)
        chunk = msgspec.structs.replace(_chunk(index, layers[0], size), parameters=layers)
        messages = sum(lot.messages for lot in alike)
        merged.append(Lot(chunk=chunk, owner=group, layers=layers, messages=messages))
    return merged
