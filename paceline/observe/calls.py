"""Where Python itself waits for an exchange: the calls of torch.distributed, and `Work.wait`.

The calls are made as before; only the moments before and after them are kept. What C++ waits for
(DDP's buckets) ends with `backward()`, and the ring says when its collectives were called.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from paceline.autograd.gradients import uncompiled
from paceline.observe.hooks import Hooks
from paceline.telemetry import StepClock

CALLS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)

KEPT_WINDOWS = 20_000
KEPT_WORKS = 1_000
"""Asynchronous calls that nobody has waited for yet; more are forgotten."""


class Window(NamedTuple):
    """One stretch in which a member called collectives, and waited for the last of them."""

    begin: float
    end: float
    """Between these moments of the monotonic clock the collectives were called."""

    blocked: float
    released: float
    """Between these the member did nothing but wait."""

    name: str
    bytes: int | None


class Calls:
    """Keeps a window for each call, until the ring takes them."""

    def __init__(self, hooks: Hooks, guard: Callable[..., Any]) -> None:
        """`guard` wraps what is ours around a call."""
        self._hooks = hooks
        self._depth = 0
        self._works: dict[int, tuple[float, float, str, int | None]] = {}
        self.windows: deque[Window] = deque(maxlen=KEPT_WINDOWS)
        self.open_since: float | None = None
        """When the call that goes on now began."""
        self.clock: StepClock | None = None
        """The one that is told of waiting; None before the first step."""

        # An error of ours must not reach the script's own calls.
        self._begin_waiting, self._end_waiting = guard(self._enter), guard(self._leave)
        self._keep = guard(self._keep_window)

    def install(self) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d
        from torch.nn.parallel import DistributedDataParallel

        for name in CALLS:
            if hasattr(dist, name):
                self._replace_everywhere((dist, distributed_c10d), name)
        self._hooks.replace(dist.Work, "wait", self._wait)
        if hasattr(DistributedDataParallel, "_sync_buffers"):
            self._hooks.replace(
                DistributedDataParallel, "_sync_buffers", lambda o: self._timed("broadcast", o)
            )

    def _replace_everywhere(self, modules: tuple[Any, ...], name: str) -> None:
        """One stand-in for a function that several modules know under its name."""
        stand_in = self._timed(name, getattr(modules[0], name))
        for module in modules:
            self._hooks.replace(module, name, lambda _: stand_in)

    def _timed(self, name: str, original: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or self._depth or not self._hooks.is_ours:
                return original(*given, **named)
            return self._call(name, original, given, named)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = original.__doc__
        call.__wrapped__ = original  # type: ignore[attr-defined]
        return call

    def _call(self, name: str, original: Any, given: Any, named: Any) -> Any:
        waiting = None if named.get("async_op") else self._begin_waiting()
        begin, self._depth = time.monotonic(), self._depth + 1
        self.open_since = begin
        try:
            result = original(*given, **named)
        finally:
            self._depth -= 1
            self._end_waiting(waiting)
            self.open_since = None
        self._keep(result, begin, name, given, named)
        return result

    def _keep_window(self, result: Any, begin: float, name: str, given: Any, named: Any) -> None:
        end, size = time.monotonic(), _bytes(given, named)
        if result is None or not hasattr(result, "wait"):
            self.windows.append(Window(begin, end, begin, end, name, size))
            return
        if len(self._works) > KEPT_WORKS:
            self._works.clear()
        self._works[id(result)] = begin, end, name, size

    def _wait(self, original: Any) -> Any:
        def wait(work: Any, *given: Any, **named: Any) -> Any:
            called = self._works.pop(id(work), None)
            if called is None or self._depth or not self._hooks.is_ours:
                return original(work, *given, **named)
            waiting, blocked = self._begin_waiting(), time.monotonic()
            try:
                return original(work, *given, **named)
            finally:
                self._end_waiting(waiting)
                begin, end, name, size = called
                self.windows.append(Window(begin, end, blocked, time.monotonic(), name, size))

        return uncompiled(wait)

    def _enter(self) -> AbstractContextManager[None] | None:
        """From now on the member waits; None where what it waits for is counted by the clock."""
        if self.clock is None or self.clock.has_ready:
            return None
        waiting = self.clock.within("exchange_exposed")
        waiting.__enter__()
        return waiting

    def _leave(self, waiting: AbstractContextManager[None] | None) -> None:
        if waiting is not None:
            waiting.__exit__(None, None, None)


def _bytes(given: Any, named: Any) -> int | None:
    """Size of the first tensor among the arguments, or in a list of them."""
    for value in (*given, *named.values()):
        tensors = value if isinstance(value, list | tuple) else [value]
        sizes = [t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)]
        if sizes:
            return sum(sizes)
    return None
