"""The flight recorder of torch.distributed: a ring of the last collectives, kept in C++.

It is read about once a second by a thread of its own. It knows when each collective was called, on
gloo too, and which have not completed; when one ended is known from the windows that `calls` and
`hooks` keep.
"""

import io
import os
import pickle
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.observe.calls import KEPT_WINDOWS, Window
from paceline.record import CollectiveCall

SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""How many collectives the ring keeps; 0, torch's default, switches it off."""

ENTRIES = 1024
ELEMENT_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2,
    "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip


def switch_on() -> None:
    """Ask torch to keep the ring; it must come before the first process group."""
    if not any(name in os.environ for name in SIZE_VARIABLES):
        os.environ[SIZE_VARIABLES[0]] = str(ENTRIES)


def switch_off() -> None:
    """Take back what `switch_on` has set."""
    if os.environ.get(SIZE_VARIABLES[0]) == str(ENTRIES):
        del os.environ[SIZE_VARIABLES[0]]


def read(*, stacks: bool = False) -> dict[str, Any] | None:
    """The recorder's dump as plain data; None where this torch keeps none."""
    import torch._C._distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return None
    try:
        found = plain_pickle(dump(True, stacks, False))
    except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError):
        return None
    return found if isinstance(found, dict) else None


class _PlainUnpickler(pickle.Unpickler):
    """Makes dictionaries, lists, text and numbers, and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would load {module}.{name}, and a dump holds plain data")

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def plain_pickle(content: bytes) -> Any:
    """Plain data from a pickle; pickle.UnpicklingError for one that would make anything else."""
    return _PlainUnpickler(io.BytesIO(content)).load()


class Follower:
    """Turns new entries of the ring, and the windows around them, into the record's lines."""

    def __init__(self) -> None:
        self._last = -1
        self._windows: deque[Window] = deque(maxlen=KEPT_WINDOWS)
        self._pending: list[CollectiveCall] = []
        self._counts: dict[str, int] = {}
        self.has_ring = False
        self.calls = 0
        """Collectives seen so far."""

    def take(
        self,
        dump: Mapping[str, Any] | None,
        windows: Iterable[Window],
        *,
        until: float | None = None,
    ) -> list[CollectiveCall]:
        """The collectives that are complete since the last call, in order.

        `until`: a moment at which the member was outside of any window, and up to which all
        windows are known; None at the end of the job, when nothing is left for another call.
        """
        self._windows.extend(windows)
        entries = (dump or {}).get("entries") or []
        if not entries:
            # Whether there is a ring shows at the first entry, or never.
            return [] if self.has_ring or until is not None else self._from_windows()
        self.has_ring = True
        offset = time.monotonic() - time.time_ns() / 1e9
        for entry in sorted(entries, key=lambda one: int(one["record_id"])):
            if int(entry["record_id"]) <= self._last:
                continue
            arrived = int(entry["time_created_ns"]) / 1e9 + offset
            settled = entry.get("retired", True) and until is not None and arrived < until
            if not settled and until is not None:
                until = min(until, arrived)
                break
            self._last = int(entry["record_id"])
            if not entry.get("is_p2p"):
                self._pending.append(collective(entry, arrived))
        return self._join(until)

    def _from_windows(self) -> list[CollectiveCall]:
        """Without a ring, calls are numbered as this member makes them."""
        found = []
        while self._windows:
            window = self._windows.popleft()
            self._counts[window.name] = number = self._counts.get(window.name, 0) + 1
            found.append(
                CollectiveCall(
                    number=number,
                    group=window.name,
                    name=window.name,
                    bytes=window.bytes,
                    arrived_seconds=window.begin,
                    blocked_seconds=window.blocked,
                    ended_seconds=window.released,
                )
            )
        self.calls += len(found)
        return found

    def _join(self, until: float | None) -> list[CollectiveCall]:
        """The last collective that was called in a window is the one its member waited for."""
        left: deque[Window] = deque(maxlen=KEPT_WINDOWS)
        times = [one.arrived_seconds for one in self._pending]
        for window in self._windows:
            if until is not None and window.end >= until:
                left.append(window)
                continue
            place = bisect_right(times, window.end) - 1
            if place >= 0 and times[place] >= window.begin:
                last = self._pending[place]
                last.blocked_seconds = max(window.blocked, last.arrived_seconds)
                last.ended_seconds = window.released
        self._windows = left
        if left and until is not None:
            until = min(until, *(window.begin for window in left))
        count = len(times) if until is None else bisect_right(times, until)
        done, self._pending = self._pending[:count], self._pending[count:]
        self.calls += len(done)
        return done


def collective(entry: Mapping[str, Any], arrived: float) -> CollectiveCall:
    """One entry of a dump as the record's line."""
    return CollectiveCall(
        number=int(entry.get("collective_seq_id", 0)),
        group=group_name(entry),
        name=operation(entry),
        bytes=size_bytes(entry),
        arrived_seconds=arrived,
    )


def group_name(entry: Mapping[str, Any]) -> str:
    """The group's number and description; every member knows the same."""
    names = entry.get("process_group") or ("",)
    return " ".join(str(name) for name in names if name)


def operation(entry: Mapping[str, Any]) -> str:
    """The collective's name without the backend's."""
    return str(entry.get("profiling_name", "")).rpartition(":")[2] or "collective"


def size_bytes(entry: Mapping[str, Any]) -> int | None:
    """Bytes that a member brings; None where a type is unknown."""
    total = 0
    sizes, types = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    for shape, dtype in zip(sizes, types, strict=False):
        if dtype not in ELEMENT_BYTES:
            return None
        count = 1
        for extent in shape:
            count *= int(extent)
        total += count * ELEMENT_BYTES[dtype]
    return total
