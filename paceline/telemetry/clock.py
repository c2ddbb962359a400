"""Where a worker's wall time goes: each moment has one phase, so the parts sum to the step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.record import PHASES, Step

OTHER = "other"
"""Time between the phases (logging, zeroing gradients): not recorded, but part of the step."""


class StepClock:
    """Attributes time to phases as the training thread passes from one to the next.

    `enter` is called by the training thread alone. `ready` may be called from autograd's threads.
    """

    def __init__(self, dilation: float = 1.0) -> None:
        """`dilation`: how many times slower than reported the emulated world runs."""
        self._dilation = dilation
        self._seconds = dict.fromkeys((*PHASES, OTHER), 0.0)
        self._phase = OTHER
        self._since = self._start = self._now()
        self._ready: float | None = None

    def _now(self) -> float:
        return time.monotonic() / self._dilation

    def enter(self, phase: str) -> None:
        """The time since the last call was the last phase's; what follows is `phase`'s."""
        now = self._now()
        since = self._since
        if self._phase == "backward" and self._ready is not None and phase != "backward":
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
        self._seconds[self._phase] -= seconds / self._dilation
        self._seconds[phase] += seconds / self._dilation

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside belongs to no step: evaluation, checkpoints."""
        self.enter(OTHER)
        began = self._now()
        yield
        now = self._now()
        self._start += now - began
        self._since = now

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
        )
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._start, self._ready = self._since, None
        return entry

    def complete(self, entry: Step) -> None:
        """Called for each step in turn, one step late: fill in what was not yet known."""
