"""The clock of a step: each moment has one phase, so the parts sum to the step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.record import PHASES, Step

OTHER = "other"
"""Time between the phases (logging, zeroing gradients): not recorded, but part of the step."""

EVALUATION = "evaluation"
"""Entered when the model is used without training; no part of any step."""


class StepClock:
    """Attributes time to phases as the training thread passes from one to the next.

    `enter` is called by the training thread alone. `ready` may be called from autograd's threads.
    """

    def __init__(self, dilation: float = 1.0) -> None:
        """`dilation`: how many times slower than reported the emulated world runs."""
        self._dilation = dilation
        self._seconds = dict.fromkeys((*PHASES, OTHER), 0.0)
        self._paused: dict[str, float] = {}
        self._phase, self._begun, self._pausing = OTHER, False, False
        self._since = self._start = self._now()
        self._ready: float | None = None

    def _now(self) -> float:
        return time.monotonic() / self._dilation

    def enter(self, phase: str) -> None:
        """The time since the last call was the last phase's; what follows is `phase`'s."""
        if self._pausing:
            return
        now = self._now()
        since = self._since
        if not self._begun and phase != OTHER:
            # What comes before the first batch is starting up, not a step.
            self._begun, self._start, self._since = True, now, now
            self._seconds[OTHER] = 0.0
            self._phase = phase
            return
        if self._phase == EVALUATION:
            self._pause(EVALUATION, now - since)
        elif self._phase == "backward" and self._ready is not None and phase != "backward":
            # backward() returns when the exchange it overlaps is done; its own part ended earlier.
            self._seconds["backward"] += self._ready - since
            self._seconds["exchange_exposed"] += now - self._ready
        else:
            self._seconds[self._phase] += now - since
        self._phase, self._since = phase, now

    def ready(self) -> None:
        """A gradient is ready to be exchanged; the last call of a step is the one that counts."""
        self._ready = self._now()

    def charge(self, phase: str, seconds: float) -> None:
        """Move `seconds` that just passed from the current phase to `phase`."""
        if self._pausing or self._phase == EVALUATION:  # what a pause waits for is no step's
            return
        if self._phase == "backward" and self._ready is not None and phase == "exchange_exposed":
            return  # `enter` counts all of it, from the last gradient on
        self._seconds[self._phase] -= seconds / self._dilation
        self._seconds[phase] += seconds / self._dilation

    def repay(self, phase: str, what: str, seconds: float) -> None:
        """Seconds that `phase` was given in this step belonged to a pause after all."""
        if self._pausing:
            return
        self._seconds[phase] -= seconds / self._dilation
        self._pause(what, seconds / self._dilation)

    @property
    def has_ready(self) -> bool:
        """Return whether backward is running and one of this step's gradients is ready."""
        return self._current() == "backward" and self._ready is not None

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Time inside is that of `phase`; afterwards the present one continues."""
        before = self._current()
        if self._pausing or before == EVALUATION:
            yield
            return
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def _current(self) -> str:
        return self._phase

    @contextmanager
    def paused(self, what: str = OTHER) -> Iterator[None]:
        """Time inside belongs to no step; `what` names it: evaluation, checkpoint, logging."""
        self.enter(OTHER)
        began, self._pausing = self._now(), True
        try:
            yield
        finally:
            self._phase, self._since, self._pausing = OTHER, self._now(), False
            self._pause(what, self._since - began)

    def _pause(self, what: str, seconds: float) -> None:
        self._start += seconds
        self._paused[what] = self._paused.get(what, 0.0) + seconds

    def begin_again(self, what: str) -> None:
        """The step is made again from its beginning; what was spent on it so far was `what`."""
        now = self._now()
        self._pause(what, now - self._start)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._phase, self._since, self._ready = OTHER, now, None

    def end_training(self) -> dict[str, float]:
        """The pauses since the last step: there is no next one whose record would hold them."""
        self.enter(OTHER)
        paused, self._paused = self._paused, {}
        return paused

    def end_step(self, step: int, samples: int) -> Step:
        """Close the step; the next one starts now."""
        self.enter(OTHER)
        entry = Step(
            step=step,
            start_seconds=self._start,
            end_seconds=self._since,
            breakdown_seconds={name: s for name, s in self._seconds.items() if s and name != OTHER},
            samples=samples,
            ready_seconds=self._ready,
            paused_seconds=self._paused,
        )
        self._paused = {}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._start, self._ready = self._since, None
        return entry

    def complete(self, entry: Step) -> None:
        """Called for each step in turn, one step late: fill in what was not yet known."""
