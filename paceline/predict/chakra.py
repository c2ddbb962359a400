"""A predicted step as Chakra execution traces, one file per worker: what ASTRA-sim reads.

    write_traces(experiment, Path("traces"))     # traces/step.0.et, step.1.et, …

Layers are compute nodes with their predicted time, buckets are all-reduces that wait for their
last gradient and for the bucket before. So another simulator can be asked about the same step. The
format is MLCommons' et_def.proto (schema 0.0.4): few enough fields to be written without its code.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline import spec
from paceline.errors import SpecError
from paceline.predict.collective_step import buckets, made_in
from paceline.predict.outcome import slowest
from paceline.predict.stacks import expected, find_stack
from paceline.predict.topology import topology_of

VERSION = "0.0.4"
COMPUTE, COLLECTIVE = 4, 7
"""Of NodeType: COMP_NODE and COMM_COLL_NODE."""

ALL_REDUCE = 0
"""Of CollectiveCommType."""


def write_traces(experiment: spec.Experiment, folder: Path) -> list[Path]:
    """One trace per worker of a synchronous all-reduce; all workers do the same."""
    if not experiment.architecture.is_all_reduce:
        name = spec.architecture_name(experiment.architecture)
        problem = f"{name} has no collective that a Chakra trace could name."
        raise SpecError("--chakra", problem, "use --architecture ring.")
    content = _delimited(_text(1, VERSION)) + b"".join(map(_delimited, _nodes(experiment)))
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"step.{worker}.et" for worker in range(experiment.cluster.workers)]
    for file in files:
        file.write_bytes(content)
    return files


def _nodes(experiment: spec.Experiment) -> Iterator[bytes]:
    stack = find_stack(experiment.prediction.stack)
    work = slowest(experiment, topology_of(experiment), expected(stack))
    number = 0
    for name, (forward, _, _) in zip(work.names, work.layers, strict=True):
        number += 1
        yield _node(number, f"forward {name}", COMPUTE, [number - 1], forward)
    backward = {}
    for index in reversed(range(len(work.layers))):
        number += 1
        backward[index] = number
        seconds = work.layers[index][1]
        yield _node(number, f"backward {work.names[index]}", COMPUTE, [number - 1], seconds)
    last_made = number
    before: list[int] = []
    for layer, size_bytes in buckets(made_in(work), experiment.architecture, stack):
        number += 1
        made = backward[len(work.layers) - 1 - layer]
        name = f"all-reduce {size_bytes} B"
        yield _node(number, name, COLLECTIVE, [made, *before], 0.0, size_bytes)
        before = [number]
    yield _node(number + 1, "update", COMPUTE, [last_made, *before], work.update_seconds)


def _node(
    number: int,
    name: str,
    kind: int,
    after: Sequence[int],
    seconds: float,
    size_bytes: int | None = None,
) -> bytes:
    known = _number(1, number) + _text(2, name) + _number(3, kind)
    known += b"".join(_number(5, other) for other in after if other)
    if seconds:
        known += _number(7, max(1, round(seconds * 1e6)))
    known += _part(10, _text(1, "is_cpu_op") + _number(27, 0))
    if size_bytes is not None:
        known += _part(10, _text(1, "comm_type") + _number(9, ALL_REDUCE))
        known += _part(10, _text(1, "comm_size") + _number(9, size_bytes))
    return known


# Protocol buffers: a field is its number and kind, then a number or a length and bytes.


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _part(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _delimited(content)


def _text(field: int, value: str) -> bytes:
    return _part(field, value.encode())


def _delimited(content: bytes) -> bytes:
    return _varint(len(content)) + content
