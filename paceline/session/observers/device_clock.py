"""A step clock for a device that works behind the script's back.

On a GPU a call returns long before its work is done, so the moments at which the script passes from
phase to phase say nothing. Here each passage is an event in the device's own stream, and a step's
times are read from the events one step later: the next step's work is in the stream by then, so
the host may wait for the last one's end without the device ever standing still.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from paceline.autograd.gradients import uncompiled
from paceline.record import PHASES, Step
from paceline.telemetry import StepClock
from paceline.telemetry.clock import EVALUATION, OTHER

PAUSED = "paused: "
"""Stands before the name of a pause, in place of a phase."""

Mark = tuple[str, torch.cuda.Event]
"""The name of a phase, and the moment in the stream at which it began."""


class _Marks:
    """Events that one step left in the stream."""

    def __init__(self, begins: Mark) -> None:
        self.passages = [begins]
        self.ready: torch.cuda.Event | None = None
        self.charges: list[tuple[str, str, float]] = []


class DeviceClock(StepClock):
    """Same calls as `StepClock`; the steps it returns are complete after `complete`."""

    def __init__(self) -> None:
        super().__init__()
        self._spare: list[torch.cuda.Event] = []
        """Events that were read: making one costs more than recording it."""
        first = self._event()
        first.synchronize()
        self._end_seconds = time.monotonic()
        self._marks = _Marks((OTHER, first))
        self._closed: deque[_Marks] = deque()
        # A compiled model has the hooks that call these inside it.
        this: Any = self
        for name in ("enter", "ready", "charge", "end_step", "complete"):
            setattr(this, name, uncompiled(getattr(self, name)))

    def enter(self, phase: str) -> None:
        if self._pausing:
            return
        self._marks.passages.append((phase, self._event()))

    def ready(self) -> None:
        if self._pausing:
            return
        if self._marks.ready is None:
            self._marks.ready = torch.cuda.Event(enable_timing=True)
        self._marks.ready.record()

    def _current(self) -> str:
        return self._marks.passages[-1][0]

    def charge(self, phase: str, seconds: float) -> None:
        self._marks.charges.append((self._marks.passages[-1][0], phase, seconds))

    def repay(self, phase: str, what: str, seconds: float) -> None:
        passages = self._marks.passages
        for index in reversed(range(len(passages))):
            if passages[index][0] == phase:
                named = what if what == EVALUATION else PAUSED + what
                passages[index] = (named, passages[index][1])
                return

    @property
    def has_ready(self) -> bool:
        return self._current() == "backward" and self._marks.ready is not None

    @contextmanager
    def paused(self, what: str = OTHER) -> Iterator[None]:
        self.enter(PAUSED + what)
        self._pausing = True
        try:
            yield
        finally:
            self._pausing = False
            self.enter(OTHER)

    def begin_again(self, what: str) -> None:
        marks = self._marks
        marks.passages = [(PAUSED + what, moment) for _, moment in marks.passages]
        marks.ready, marks.charges = None, []
        self.enter(OTHER)

    def end_training(self) -> dict[str, float]:
        self.enter(OTHER)
        self._marks.passages[-1][1].synchronize()
        return _pauses(self._marks.passages)

    def end_step(self, step: int, samples: int) -> Step:
        self.enter(OTHER)
        self._closed.append(self._marks)
        self._marks = _Marks(self._marks.passages[-1])
        return Step(
            step=step, start_seconds=0.0, end_seconds=0.0, breakdown_seconds={}, samples=samples
        )

    def complete(self, entry: Step) -> None:
        marks = self._closed.popleft()
        marks.passages[-1][1].synchronize()
        seconds = dict.fromkeys((*PHASES, OTHER), 0.0)
        entry.paused_seconds = _pauses(marks.passages)
        now = entry.start_seconds = self._end_seconds
        pairs = zip(marks.passages, marks.passages[1:], strict=False)
        for (phase, begin), (_, end) in pairs:
            spent = begin.elapsed_time(end) / 1e3
            if _pause_of(phase):
                pass  # in paused_seconds
            elif phase == "backward" and marks.ready is not None:
                own = min(max(begin.elapsed_time(marks.ready) / 1e3, 0.0), spent)
                entry.ready_seconds = now + own
                seconds["exchange_exposed"] += spent - own
                seconds["backward"] += own
            else:
                seconds[phase] += spent
            now += spent
        for source, target, moved in marks.charges:
            if _pause_of(source):
                continue
            seconds[source] -= moved
            seconds[target] += moved
        self._end_seconds = entry.end_seconds = now
        entry.start_seconds += sum(entry.paused_seconds.values())
        entry.breakdown_seconds = {name: s for name, s in seconds.items() if s and name in PHASES}
        # The last event is also the first of the next step.
        self._spare += [event for _, event in marks.passages[:-1]]

    def _event(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _pause_of(phase: str) -> str:
    """Return what a passage into `phase` pauses for; empty for a phase of a step."""
    return phase if phase == EVALUATION else phase.partition(PAUSED)[2]


def _pauses(passages: list[Mark]) -> dict[str, float]:
    """Seconds of each pause between the passages."""
    paused: dict[str, float] = {}
    for (phase, begin), (_, end) in pairwise(passages):
        what = _pause_of(phase)
        if what:
            paused[what] = paused.get(what, 0.0) + begin.elapsed_time(end) / 1e3
    return paused
