"""Whose software exchanges, as constants with their ranges: stacks.toml beside this file.

A *stack* is how a framework divides, places and moves gradients and what that costs. A prediction
takes each constant at its expected value, and once more at each end of its range, for the interval.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from paceline.errors import SpecError, suggest
from paceline.protocol.buckets import FIRST_BUCKET_BYTES, RING_BUCKET_BYTES

FILE = Path(__file__).with_name("stacks.toml")
Range = tuple[float, float, float]
"""Low, expected, high."""

DECODED_PER_SECOND = 16_000.0
"""Pictures a second that a large host of that time decodes; what `input_fraction` is a share of."""


class LinkFractions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tcp: Range
    rdma: Range
    bus: Range


class Stack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One software, with ranges; stacks.toml says what each constant means."""

    source: str
    model_fraction: float
    """What the model leaves out of this software, whatever its constants, at 90 %."""

    exposed_fraction: float
    """What the model leaves out of an exchange that workers wait for, of that wait, at 90 %."""

    exchange: Literal["answer", "pull"]
    """With servers: weights come back in answer to gradients, or are fetched at a step's start."""

    place: Literal["chunks", "variables", "arrays"]
    """What is dealt to servers: chunks by bytes, whole variables by bytes, or arrays, the large
    ones cut evenly."""

    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    bucket_bytes: int = RING_BUCKET_BYTES
    """Left out by our own, whose sizes are the protocol's."""

    algorithms: tuple[Literal["ring", "tree"], ...] = ("ring",)
    sums_in_host: bool = False
    """Devices of one host are summed before anything leaves it, in synchronous training."""

    link_fraction: LinkFractions
    process_rate: Range
    message_seconds: Range
    sum_rate: Range
    cycle_seconds: Range
    launch_seconds: Range
    negotiation_seconds: Range
    hop_seconds: Range
    jitter_fraction: Range
    crowd_fraction: Range
    input_fraction: Range
    contention_fraction: Range
    collision_fraction: Range
    tensor_seconds: Range
    copy_passes: Range
    layer_overhead_seconds: Range
    codec_speed: Range = (0.5, 1.0, 2.0)


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Every constant at one value: what one simulation runs with."""

    tcp_fraction: float
    rdma_fraction: float
    bus_fraction: float
    process_rate: float
    message_seconds: float
    sum_rate: float
    cycle_seconds: float
    launch_seconds: float
    negotiation_seconds: float
    hop_seconds: float
    jitter_fraction: float
    crowd_fraction: float
    input_fraction: float
    contention_fraction: float
    collision_fraction: float
    tensor_seconds: float
    copy_passes: float
    layer_overhead_seconds: float
    codec_speed: float = 1.0

    def fraction(self, kind: str) -> float:
        """What is left of a link of this kind for payload."""
        found: float = getattr(self, f"{kind}_fraction")
        return found


@cache
def stacks() -> dict[str, Stack]:
    """Every stack by name."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return msgspec.convert(tables, dict[str, Stack])


def find_stack(name: str) -> Stack:
    known = stacks()
    if name not in known:
        raise SpecError("stack", f'"{name}" is not a known software.', suggest(name, known))
    return known[name]


def ranges(stack: Stack) -> dict[str, Range]:
    """Constant -> low, expected, high."""
    found: dict[str, Range] = {}
    for name in Constants.__struct_fields__:
        if name in LinkFractions.__struct_fields__ or hasattr(stack, name):
            found[name] = getattr(stack, name)
        else:
            found[name] = getattr(stack.link_fraction, name.removesuffix("_fraction"))
    return found


def expected(stack: Stack) -> Constants:
    return Constants(**{name: middle for name, (_, middle, _) in ranges(stack).items()})
