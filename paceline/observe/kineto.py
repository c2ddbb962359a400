"""Read a Kineto trace (`*.pt.trace.json`, `.gz`) as a stream: a gigabyte in little memory.

Events are decoded in batches, and only those that a verdict needs are kept: annotations of steps,
loaders, models and optimizers, the passes of autograd, collectives, and kernels of a GPU.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import RecordError

CHUNK_BYTES = 8 << 20
MOST_HEADER_BYTES = 64 << 20
MOST_EVENT_BYTES = 256 << 20
"""One event is never this large; a file in which none ends before it is damaged or hostile."""

EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
BEGINS = re.compile(rb'\{\s*"ph"\s*:')

Interval = tuple[float, float]
"""Beginning and end in seconds since 1970, on the clock of the trace's host."""


class _Arguments(msgspec.Struct, rename={
    "dims": "Input Dims", "types": "Input type", "collective": "Collective name",
    "elements": "In msg nelems", "dtype": "dtype", "group": "Process Group Name",
}):  # fmt: skip
    dims: Any = None
    types: Any = None
    collective: Any = None
    elements: Any = None
    dtype: Any = None
    group: Any = None


class _Event(msgspec.Struct):
    ph: str = ""
    name: Any = ""
    cat: Any = ""
    ts: Any = 0.0
    dur: Any = 0.0
    tid: Any = 0
    args: _Arguments | None = None


@dataclass
class CollectiveEvent:
    """One collective of a trace."""

    name: str
    group: str
    begin: float
    end: float
    bytes: int | None


@dataclass
class Trace:
    """What is kept of one rank's trace; times in seconds since 1970."""

    path: Path
    rank: int = 0
    ranks: int = 1
    backend: str = ""
    host: str = ""
    steps: dict[int, Interval] = field(default_factory=dict)
    input: list[Interval] = field(default_factory=list)
    forward: list[Interval] = field(default_factory=list)
    backward: list[Interval] = field(default_factory=list)
    update: list[Interval] = field(default_factory=list)
    called: list[float] = field(default_factory=list)
    """When collectives were called, in order."""
    collectives: list[CollectiveEvent] = field(default_factory=list)
    kernels: list[Interval] = field(default_factory=list)
    """Work of a GPU other than collectives."""


ELEMENTS = {"float": 4, "double": 8, "long int": 8, "int": 4, "c10::Half": 2, "c10::BFloat16": 2,
            "Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8, "Int": 4,
            "Byte": 1, "unsigned char": 1}  # fmt: skip


def read_trace(path: Path) -> Trace:
    """The trace at `path`; RecordError in one sentence for what is none, or is damaged."""
    try:
        return _read(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
    except (msgspec.MsgspecError, json.JSONDecodeError, RecursionError) as error:
        text = str(error).splitlines()[0]
        raise RecordError(f"{path} is damaged: {text}. Export the trace again.") from error
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError) as error:
        raise RecordError(f"{path} is not a trace that Kineto wrote: {error}.") from error


def _read(path: Path) -> Trace:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        buffer = bytearray()
        while (found := EVENTS.search(buffer)) is None:
            chunk = file.read(CHUNK_BYTES)
            buffer += chunk
            if not chunk or len(buffer) > MOST_HEADER_BYTES:
                raise RecordError(f"{path} is not a Kineto trace: it has no traceEvents.")
        trace, base = _header(path, bytes(buffer[: found.start()]))
        del buffer[: found.end()]
        _events(trace, base, _batches(path, file, buffer))
    return trace


def _header(path: Path, text: bytes) -> tuple[Trace, float]:
    """What stands before the events: whose trace it is, and when its clock began."""
    head = json.loads(text.rstrip().rstrip(b",") + b"}")
    told = head.get("distributedInfo") or {}
    trace = Trace(
        path=path,
        rank=int(told.get("rank", 0)),
        ranks=int(told.get("world_size", 1)),
        backend=str(told.get("backend", "")),
        host=str(head.get("host_name", "")),
    )
    return trace, int(head.get("baseTimeNanoseconds", 0)) / 1e9


def _batches(path: Path, file: Any, buffer: bytearray) -> Iterator[list[_Event]]:
    """Whole events, as many at once as a chunk holds."""
    decoder = msgspec.json.Decoder(list[_Event])
    while True:
        chunk = file.read(CHUNK_BYTES)
        if not chunk:
            break
        searched = max(0, len(buffer) - 64)
        buffer += chunk
        starts = [found.start() for found in BEGINS.finditer(buffer, searched)]
        if not starts or not starts[-1]:
            if len(buffer) > MOST_EVENT_BYTES:
                raise RecordError(f"{path} is damaged: an event of it never ends.")
            continue
        whole = bytes(buffer[: starts[-1]]).strip().rstrip(b",")
        if whole:
            yield decoder.decode(b"[" + whole.lstrip(b",") + b"]")
        del buffer[: starts[-1]]
    rest = bytes(buffer)
    end = _end_of_list(rest)
    if end is None:
        raise RecordError(f"{path} is truncated: its list of events does not end.")
    yield decoder.decode(b"[" + rest[:end].strip().lstrip(b",") + b"]")


def _end_of_list(text: bytes) -> int | None:
    """Where the list of events is closed: the first bracket after which the rest is an object."""
    place = text.rfind(b"]")
    while place >= 0:
        tail = text[place + 1 :].strip()
        try:
            if tail == b"}" or (tail[:1] == b"," and json.loads(b"{" + tail[1:]) is not None):
                return place
        except ValueError:
            pass
        place = text.rfind(b"]", 0, place)
    return None


def _events(trace: Trace, base: float, batches: Iterator[list[_Event]]) -> None:
    for batch in batches:
        for event in batch:
            if event.ph == "X":
                begin = base + float(event.ts) / 1e6
                _keep(trace, event, str(event.name), (begin, begin + float(event.dur) / 1e6))


def _keep(trace: Trace, event: _Event, name: str, when: Interval) -> None:
    if event.cat == "cpu_op":
        if name.startswith("autograd::engine::evaluate_function"):
            _join(trace.backward, when)
        elif name.startswith("c10d::") and name.endswith("_"):
            trace.called.append(when[0])
    elif event.cat == "user_annotation":
        if name.startswith("ProfilerStep#"):
            trace.steps[int(name.removeprefix("ProfilerStep#"))] = when
        elif name.startswith("enumerate(DataLoader)"):
            trace.input.append(when)
        elif name.startswith("Optimizer.step#"):
            trace.update.append(when)
        elif name == "DistributedDataParallel.forward":
            trace.forward.append(when)
        elif name.startswith("gloo:"):
            trace.collectives.append(_collective(event, name, when))
    elif event.cat in ("kernel", "gpu_memcpy", "gpu_memset"):
        if name.startswith("nccl"):
            trace.collectives.append(_collective(event, name, when))
        else:
            _join(trace.kernels, when)


def _join(intervals: list[Interval], when: Interval) -> None:
    """Add an interval; one that touches the last becomes a part of it."""
    if intervals and intervals[-1][0] <= when[0] <= intervals[-1][1]:
        intervals[-1] = (intervals[-1][0], max(intervals[-1][1], when[1]))
    else:
        intervals.append(when)


def _collective(event: _Event, name: str, when: Interval) -> CollectiveEvent:
    told = event.args or _Arguments()
    size = None
    if isinstance(told.elements, int):
        size = told.elements * ELEMENTS.get(str(told.dtype), 4)
    elif isinstance(told.dims, list) and isinstance(told.types, list):
        size = _dims_bytes(told.dims, told.types)
    short = name.partition(":")[2] or str(told.collective or "")
    return CollectiveEvent(
        name=short or name.split("_")[1].split("(")[0] if "_" in name or short else name,
        group=str(told.group or ""),
        begin=when[0],
        end=when[1],
        bytes=size,
    )


def _dims_bytes(dims: list[Any], types: list[Any]) -> int | None:
    total = 0
    for shape, kind in zip(dims, types, strict=False):
        count = ELEMENTS.get(str(kind))
        if count is None or not isinstance(shape, list):
            return None
        for extent in shape:
            count *= int(extent)
        total += count
    return total
