"""Compression of chunks: what travels in place of a gradient, and what it costs.

A codec encodes a worker's gradient chunk into one payload and decodes it at the server. What a
lossy codec leaves out is kept and added to the next gradient of that chunk (error feedback), so
that nothing is lost, only late. Weights travel back whole.
"""

import time
from abc import ABC, abstractmethod

import msgspec
import torch
from torch import Tensor

from paceline.spec.server import Compression


class Codec:
    """`none`: the gradient's own bytes, from where they lie."""

    def encode(self, chunk: int, values: Tensor) -> memoryview:
        """The payload for a gradient; called once per chunk and step, on the worker."""
        return _bytes(values)

    def decode(self, payload: memoryview, elements: int, dtype: torch.dtype) -> Tensor:
        """The gradient again; called on the server."""
        return torch.frombuffer(payload, dtype=dtype)

    def plain(self, values: Tensor) -> memoryview:
        """The bytes themselves, for what must arrive as it is: weights, optimizer state."""
        return _bytes(values)

    def counters(self) -> dict[str, object]:
        """What it cost, for the record."""
        return {}

    def left_out(self) -> dict[int, Tensor]:
        """What waits for the next gradient of each chunk."""
        return {}

    def put_back(self, left_out: dict[int, Tensor]) -> None:
        """Go on with what was left out before."""


class Lossy(Codec, ABC):
    """Base of those that leave something out; keeps it for the next time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Spent encoding and decoding."""
        self.raw_bytes = 0
        self.encoded_bytes = 0
        self._left_out: dict[int, Tensor] = {}

    def encode(self, chunk: int, values: Tensor) -> memoryview:
        began = time.monotonic()
        payload = self._encode(chunk, values)
        self.raw_bytes += values.numel() * values.element_size()
        self.encoded_bytes += payload.nbytes
        self.seconds += time.monotonic() - began
        return payload

    def decode(self, payload: memoryview, elements: int, dtype: torch.dtype) -> Tensor:
        began = time.monotonic()
        values = self._decode(payload, elements, dtype)
        self.seconds += time.monotonic() - began
        return values

    def counters(self) -> dict[str, object]:
        return {
            "compression_seconds": self.seconds,
            "compression_raw_bytes": self.raw_bytes,
            "compression_encoded_bytes": self.encoded_bytes,
        }

    def left_out(self) -> dict[int, Tensor]:
        return dict(self._left_out)

    def put_back(self, left_out: dict[int, Tensor]) -> None:
        self._left_out = dict(left_out)

    @abstractmethod
    def _encode(self, chunk: int, values: Tensor) -> memoryview: ...

    @abstractmethod
    def _decode(self, payload: memoryview, elements: int, dtype: torch.dtype) -> Tensor: ...

    def _with_left_out(self, chunk: int, values: Tensor) -> Tensor:
        kept = self._left_out.get(chunk)
        return values.float() if kept is None else kept.add_(values)

    def _leave_out(self, chunk: int, wanted: Tensor, sent: Tensor) -> None:
        self._left_out[chunk] = wanted.sub(sent)


class Half(Lossy):
    """`fp16`, `bf16`: two bytes an element."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._limits = torch.finfo(dtype)

    def _encode(self, chunk: int, values: Tensor) -> memoryview:
        wanted = self._with_left_out(chunk, values)
        sent = wanted.clamp(self._limits.min, self._limits.max).to(self._dtype)
        self._leave_out(chunk, wanted, sent.float())
        return _bytes(sent)

    def _decode(self, payload: memoryview, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(payload, dtype=self._dtype).to(dtype)


class Int8(Lossy):
    """`int8`: one byte an element, and one scale for every block of 1024."""

    BLOCK = 1024

    def _encode(self, chunk: int, values: Tensor) -> memoryview:
        wanted = self._with_left_out(chunk, values)
        blocks = torch.nn.functional.pad(wanted, (0, -wanted.numel() % self.BLOCK))
        blocks = blocks.view(-1, self.BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True).div_(127).clamp_(min=1e-30)
        quantized = blocks.div(scales).round_().to(torch.int8)
        sent = quantized.float().mul_(scales).view(-1)[: wanted.numel()]
        self._leave_out(chunk, wanted, sent)
        numbers = quantized.view(-1)[: wanted.numel()]
        return memoryview(_raw(scales.view(-1)) + _raw(numbers))

    def _decode(self, payload: memoryview, elements: int, dtype: torch.dtype) -> Tensor:
        blocks = -(-elements // self.BLOCK)
        scales = torch.frombuffer(bytearray(payload[: 4 * blocks]), dtype=torch.float32)
        numbers = torch.frombuffer(bytearray(payload[4 * blocks :]), dtype=torch.int8)
        padded = torch.nn.functional.pad(numbers, (0, -elements % self.BLOCK))
        values = padded.view(-1, self.BLOCK).float().mul_(scales.unsqueeze(1))
        return values.view(-1)[:elements].to(dtype)


class TopK(Lossy):
    """`topk`: the largest elements with their places; the rest waits."""

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self._fraction = fraction

    def _encode(self, chunk: int, values: Tensor) -> memoryview:
        wanted = self._with_left_out(chunk, values)
        count = max(1, round(wanted.numel() * self._fraction))
        places = wanted.abs().topk(count, sorted=False).indices
        chosen = wanted[places]
        rest = wanted.clone()
        rest[places] = 0.0
        self._left_out[chunk] = rest
        return memoryview(msgspec.msgpack.encode((_raw(places.to(torch.int32)), _raw(chosen))))

    def _decode(self, payload: memoryview, elements: int, dtype: torch.dtype) -> Tensor:
        places, chosen = msgspec.msgpack.decode(payload, type=tuple[bytes, bytes])
        values = torch.zeros(elements, dtype=torch.float32)
        index = torch.frombuffer(bytearray(places), dtype=torch.int32).long()
        values[index] = torch.frombuffer(bytearray(chosen), dtype=torch.float32)
        return values.to(dtype)


def make_codec(name: Compression, topk_fraction: float = 0.01) -> Codec:
    """The codec an architecture's `compression` option names."""
    if name == "none":
        return Codec()
    if name == "int8":
        return Int8()
    if name == "topk":
        return TopK(topk_fraction)
    return Half(torch.float16 if name == "fp16" else torch.bfloat16)


def _bytes(values: Tensor) -> memoryview:
    values = values.contiguous()
    if values.dtype == torch.bfloat16:  # NumPy has no such numbers
        values = values.view(torch.uint8)
    return values.numpy().data


def _raw(values: Tensor) -> bytes:
    return bytes(_bytes(values))
