"""How gradients get from a worker to a seat, and weights back: three ways, one interface.

    Local     inside one process: tensors as they are (`Spared`: and to another seat beside it)
    Shared    between processes of one host: in memory that both see
    Wire      in packets, from where the values lie to where they belong

A worker has a transport for each chunk and a seat one for each worker. What they return as payloads
goes into a packet, and what they are given as payloads came in one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.served.compression import Codec
from paceline.served.memory import Flats, Piece, from_buffer, gather

Payloads = Sequence[memoryview | None]
"""None where one was received into its place."""


class Transport(ABC):
    """The way between one worker and one seat."""

    def moves(self, chunk: int) -> int:
        """How many bytes of payload travel for a chunk, either way; a lossy codec sends fewer."""
        return 0

    # The worker's end.

    @abstractmethod
    def put_gradient(self, chunk: int, pieces: list[Piece]) -> None:
        """A gradient is made. Called by the thread that trains, while its cache has the values."""

    def place(self, chunk: int) -> Tensor | None:
        """Memory that a gradient may be written to in place of `put_gradient`; None without any."""
        return None

    def gradient_payloads(self, chunk: int) -> list[memoryview]:
        return []

    @abstractmethod
    def take_weights(self, chunk: int, payloads: Payloads) -> None:
        """Weights, or a mean, are there: have them where the worker reads."""

    # The seat's end.

    @abstractmethod
    def take_gradient(self, chunk: int, payloads: Payloads) -> list[Piece]: ...

    def weights_payloads(self, chunk: int) -> list[memoryview]:
        return []


class Transports(dict[str, Transport]):
    """A seat's ways to workers: those known from the start, and those who join."""

    def __init__(self, known: Mapping[str, Transport], find: Callable[[str], Transport]) -> None:
        super().__init__(known)
        self._find = find

    def __missing__(self, worker: str) -> Transport:
        found = self[worker] = self._find(worker)
        return found


class Local(Transport):
    def __init__(self, held: Flats, served: Flats, wire: "Wire | None" = None) -> None:
        """`wire`: where a gradient may be that was made when its chunk was served elsewhere."""
        self._held, self._served, self._wire = held, served, wire
        self._made: dict[int, list[Piece]] = {}

    def put_gradient(self, chunk: int, pieces: list[Piece]) -> None:
        self._made[chunk] = pieces

    def take_gradient(self, chunk: int, payloads: Payloads) -> list[Piece]:
        if chunk not in self._made and self._wire is not None:
            return self._wire.kept(chunk)
        return self._made.pop(chunk)

    def take_weights(self, chunk: int, payloads: Payloads) -> None:
        if self._held is not self._served:
            self._held.chunk(chunk).copy_(self._served.chunk(chunk))


class Spared(Transport):
    """Of a worker that serves: inside its process, and to the seat that keeps a spare."""

    def __init__(self, local: Local, wire: "Wire") -> None:
        self._local, self._wire = local, wire

    def moves(self, chunk: int) -> int:
        return self._wire.moves(chunk)

    def put_gradient(self, chunk: int, pieces: list[Piece]) -> None:
        self._local.put_gradient(chunk, pieces)
        self._wire.put_gradient(chunk, pieces)

    def gradient_payloads(self, chunk: int) -> list[memoryview]:
        return self._wire.gradient_payloads(chunk)

    def take_weights(self, chunk: int, payloads: Payloads) -> None:
        self._wire.forget(chunk)
        self._local.take_weights(chunk, payloads)

    def take_gradient(self, chunk: int, payloads: Payloads) -> list[Piece]:
        return self._local.take_gradient(chunk, payloads)


class Shared(Transport):
    def __init__(
        self, gradients: Flats, held: Flats | None, served: Flats, *, copies: bool
    ) -> None:
        """`gradients`: the worker's. `held`: where it reads weights, at its own end. `copies`: it
        may write its next gradient before this one is summed."""
        self._gradients, self._held, self._served = gradients, held, served
        self._copies = copies

    def put_gradient(self, chunk: int, pieces: list[Piece]) -> None:
        into = self._gradients.chunk(chunk)
        size, at = into.element_size(), into.data_ptr()
        if not all(values.data_ptr() == at + start * size for start, _, values in pieces):
            gather(pieces, into)  # else it was made there

    def place(self, chunk: int) -> Tensor | None:
        return self._gradients.chunk(chunk)

    def take_gradient(self, chunk: int, payloads: Payloads) -> list[Piece]:
        values = self._gradients.chunk(chunk)
        return [(0, values.numel(), values.clone() if self._copies else values)]

    def take_weights(self, chunk: int, payloads: Payloads) -> None:
        if self._held is not None and self._held is not self._served:
            self._held.chunk(chunk).copy_(self._served.chunk(chunk))


class Wire(Transport):
    def __init__(self, weights: Flats, codec: Codec, *, keeps: bool = False) -> None:
        """`weights`: where this end has them. `keeps`: a gradient may have to be sent once more, to
        another seat, until it is answered."""
        self._weights, self._codec, self._keeps = weights, codec, keeps
        self._made: dict[int, list[Piece]] = {}
        self._sent: dict[int, memoryview] = {}

    def moves(self, chunk: int) -> int:
        return self._weights.buffer(chunk).nbytes

    def put_gradient(self, chunk: int, pieces: list[Piece]) -> None:
        self._made[chunk] = pieces

    def gradient_payloads(self, chunk: int) -> list[memoryview]:
        if chunk not in self._made:
            return [self._sent[chunk]]
        payload = self._encoded(chunk)
        if self._keeps:
            self._sent[chunk] = payload
        return [payload]

    def kept(self, chunk: int) -> list[Piece]:
        """A gradient that was made, and perhaps sent, and is not answered."""
        if chunk in self._made:
            return self._made[chunk]
        return self.take_gradient(chunk, [self._sent[chunk]])

    def forget(self, chunk: int) -> None:
        """It is answered."""
        self._made.pop(chunk, None)
        self._sent.pop(chunk, None)

    def _encoded(self, chunk: int) -> memoryview:
        pieces, like = self._made.pop(chunk), self._weights.chunk(chunk)
        whole = len(pieces) == 1 and pieces[0][:2] == (0, like.numel())
        values = pieces[0][2] if whole else gather(pieces, torch.empty_like(like))
        if self._weights.is_exact(chunk):
            return self._codec.plain(values)
        return self._codec.encode(chunk, values)

    def take_gradient(self, chunk: int, payloads: Payloads) -> list[Piece]:
        (payload,), like = payloads, self._weights.chunk(chunk)
        assert payload is not None
        if self._weights.is_exact(chunk):
            return [(0, like.numel(), from_buffer(payload, like.dtype))]
        return [(0, like.numel(), self._codec.decode(payload, like.numel(), like.dtype))]

    def weights_payloads(self, chunk: int) -> list[memoryview]:
        return [self._weights.buffer(chunk)]

    def take_weights(self, chunk: int, payloads: Payloads) -> None:
        (payload,), target = payloads, self._weights.chunk(chunk)
        self._sent.pop(chunk, None)
        if payload is not None:
            target.copy_(from_buffer(payload, target.dtype))
