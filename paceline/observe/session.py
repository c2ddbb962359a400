"""What one process of a foreign job records, from its start to its end.

An error of ours ends the observation and never the job: it is told in one line, and the hooks are
taken out. Nothing here touches a tensor of the job but to copy a loss.
"""

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.observe import place, ring
from paceline.observe.calls import Calls, Window
from paceline.observe.hooks import Hooks
from paceline.observe.watchdog import Watchdog
from paceline.observe.writing import CollectiveLines
from paceline.record import RunFolder, Step
from paceline.record.entries import NOT_FINITE
from paceline.session.observers.device_clock import DeviceClock
from paceline.session.observers.nonfinite import NonfiniteValues
from paceline.session.observers.seen_loss import SeenLoss, StepLoss
from paceline.telemetry import Recorder, StepClock

LOOK_SECONDS, READ_SECONDS = 1.0, 5.0
"""Between two looks at the job, and between two readings of the flight recorder, which cost more;
a job that takes no step, or fills the ring sooner, is read at every look."""

_observation: "Observation | None" = None


def start(folder: str = "", script: str = "") -> None:
    """Observe this process; called again it does nothing."""
    global _observation
    if _observation is None:
        _observation = Observation(folder, script or (sys.argv[0] if sys.argv else ""))
        _observation.begin()


def observation() -> "Observation | None":
    """The one of this process, if it is observed."""
    return _observation


def stop() -> None:
    """End the observation of this process, and take its hooks out."""
    global _observation
    if _observation is not None:
        _observation.end()
        _observation = None


def _is_pacelines() -> bool:
    """Whether the script has a session of its own."""
    own = sys.modules.get("paceline.session.start")
    return own is not None and own._session is not None


class Observation:
    """One process of a job: its hooks, its clock, its files."""

    def __init__(self, asked: str, script: str) -> None:
        self._asked, self._script = asked, script
        self.identity = place.this_rank()
        self.rank = self.identity.index
        self.clock = StepClock()
        self.hooks = Hooks(self, self.guarded)
        self.calls = Calls(self.hooks, self.guarded)
        self.step = 0
        self.folder: RunFolder | None = None
        self.recorder: Recorder | None = None
        self.architecture = "single"
        self.is_broken = False
        self._is_open = False
        self._loss, self._numbers = SeenLoss(), NonfiniteValues()
        self._open_step: tuple[Step, StepLoss | None, Any] | None = None
        self._waiting: list[Step] = []
        """Complete steps from before there was a folder to write them to."""
        self._lines: CollectiveLines | None = None
        self._follower = ring.Follower()
        self._watchdog: Watchdog | None = None
        self._dump: Any = None
        self._looked_step, self._read_at, self._read_again = 0, time.monotonic(), 0.0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._excepthook = self._previous = sys.excepthook

    @property
    def name(self) -> str:
        """The member's name in the record, as the user knows it."""
        return f"rank{self.rank}"

    def guarded(self, do: Callable[..., Any]) -> Callable[..., Any]:
        """`do`, whose errors end the observation and go no further."""

        @wraps(do)
        def guard(*given: Any, **named: Any) -> Any:
            if self.is_broken:
                return None
            try:
                return do(*given, **named)
            except Exception as error:
                self.give_up(error)
                return None

        return guard

    def give_up(self, error: BaseException) -> None:
        """Say once that observing has failed; the job continues without it."""
        if self.is_broken:
            return
        self.is_broken = True
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        if os.environ.get("PACELINE_OBSERVE_DEBUG"):
            traceback.print_exc()
        print(
            f"paceline observe: {self.name} is no longer observed ({what}); the job continues.",
            file=sys.stderr,
        )
        self._done.set()

    def begin(self) -> None:
        self.guarded(self._begin)()

    def _begin(self) -> None:
        ring.switch_on()
        self.hooks.install()
        if torch.distributed.is_available():
            self.calls.install()
            self.hooks.replace(torch.distributed, "init_process_group", self._after_meeting)
            if torch.distributed.is_initialized():
                self.open()
        previous = sys.excepthook

        def remember(kind: Any, error: Any, trace: Any) -> None:
            self._error = error
            self.guarded(self._note_error)(error)
            previous(kind, error, trace)

        sys.excepthook = self._excepthook = remember
        self._previous = previous
        atexit.register(self.end)

    def _after_meeting(self, original: Any) -> Any:
        opened = self.guarded(self.open)

        @wraps(original)
        def init_process_group(*given: Any, **named: Any) -> Any:
            result = original(*given, **named)
            opened()
            return result

        return init_process_group

    def open(self) -> None:
        """Agree on the folder with the other ranks, and begin to write."""
        if self._is_open:
            return
        self._is_open = True
        if _is_pacelines():
            self._step_aside()
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
            self.folder = place.agree(self._asked, self._script)
        else:
            self.folder = place.alone(self._asked, self._script, self.identity)
        if self.folder is None:
            self.is_broken = True
            return
        self._lines = CollectiveLines(self.folder, self.name)
        self.recorder = Recorder(
            self.folder,
            name=self.name,
            role="worker",
            host=place.host_name(self.identity),
            owns_interfaces=self.identity.owns_interfaces,
            warmup_steps=place.WARMUP_STEPS,
        )
        self.recorder.__enter__()
        self._watchdog = Watchdog(self.folder, self.name)
        self._thread = threading.Thread(target=self._follow, name="paceline-observe", daemon=True)
        self._thread.start()
        for entry in self._waiting:
            self.recorder.add_step(entry)
        self._waiting.clear()

    def _step_aside(self) -> None:
        """The script calls `paceline.init`: its own session records it, and sees more."""
        self.is_broken = True
        self.hooks.remove()

    # What the hooks tell.

    def found(self, roots: list[torch.nn.Module], optimizer: Optimizer) -> None:
        self.architecture = place.architecture_of(roots)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.is_cuda for p in parameters):
            self.clock = DeviceClock()
        self._numbers.watch(parameters)
        if self.architecture in ("ddp", "collectives"):
            self.hooks.watch_gradients(optimizer)
        self.calls.clock = self.clock

    def backward_begins(self, tensors: Any, gradients: Any) -> None:
        self._loss.look(tensors, gradients)

    def backward_ended(self, began: float, ready: float | None) -> None:
        if ready is not None and self.architecture == "ddp":
            now = time.monotonic()
            self.calls.windows.append(Window(began, now, ready, now, "all_reduce", None))

    def step_ended(self, optimizer: Optimizer, samples: int) -> None:
        if not self._is_open:
            self.open()
        if self.is_broken:
            return
        entry = self.clock.end_step(self.step, samples)
        rate = optimizer.param_groups[0].get("lr")
        entry.learning_rate = None if rate is None else float(rate)
        self._write_open_step()
        self._open_step = entry, self._loss.take(), self._numbers.take()
        self.step += 1

    def _write_open_step(self) -> None:
        """A step is written one step late, when reading its loss no longer stalls a GPU."""
        found, self._open_step = self._open_step, None
        if found is None:
            return
        entry, loss, seen = found
        self.clock.complete(entry)
        entry.loss = None if loss is None else float(loss)
        complaint = self._numbers.complaint(self.name, entry.step, entry.loss, seen)
        if self.recorder is None:
            self._waiting.append(entry)
            return
        if complaint:
            self.recorder.note(complaint, NOT_FINITE, entry.step)
        self.recorder.add_step(entry)

    # What runs beside the job.

    def _follow(self) -> None:
        while not self._done.wait(LOOK_SECONDS):
            self.guarded(self._look)()

    def _look(self) -> None:
        assert self._watchdog is not None, "the folder is open"
        now = time.monotonic()
        steps, self._looked_step = self.step - self._looked_step, self.step
        if not steps or not self._dump or now + LOOK_SECONDS > self._read_again:
            before = self._follower.calls
            self._dump = ring.read() if torch.distributed.is_initialized() else None
            until = min(self.hooks.open_since or now, self.calls.open_since or now)
            self._write_collectives(self._dump, until)
            rate = (self._follower.calls - before) / max(now - self._read_at, LOOK_SECONDS)
            fills = ring.ENTRIES / 3 / max(rate, 1e-9)
            self._read_at, self._read_again = now, now + min(READ_SECONDS, fills)
        self._watchdog.look(self.step, self._dump)

    def _write_collectives(self, dump: Any, until: float | None) -> None:
        windows = [self.calls.windows.popleft() for _ in range(len(self.calls.windows))]
        assert self._lines is not None, "the folder is open"
        self._lines.add(self._follower.take(dump, windows, until=until))

    def end(self) -> None:
        """Write what is left, at the end of the process; a fork of it has nothing to write."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.end)
        self.guarded(self._end)()
        self.hooks.remove()
        ring.switch_off()
        if sys.excepthook is self._excepthook:
            sys.excepthook = self._previous

    def _end(self) -> None:
        self._done.set()
        if self.folder is None or self.recorder is None:
            return
        if self._thread is not None:
            self._thread.join()
        self._write_open_step()
        dump = ring.read() if torch.distributed.is_available() else None
        self._write_collectives(dump, None)
        member = self.recorder.member
        member.paused_seconds = self.clock.end_training()
        self._describe()
        error = self._error
        self.recorder.__exit__(type(error) if error else None, error, None)
        if self.rank == 0:
            from paceline.observe.finish import conclude_with_others

            conclude_with_others(self.folder)

    def _note_error(self, error: BaseException) -> None:
        """The first rank that fails says why the run failed; the others fail because of it."""
        if self.folder is None or self.recorder is None:
            return
        first = not any(event.kind == "failed" for event in self.folder.events())
        lines = traceback.format_exception_only(error)
        text = f"{self.name} ended with {lines[-1].strip() if lines else type(error).__name__}"
        self.recorder.note(text, "failed" if first else "failed-after", self.step)

    def _describe(self) -> None:
        """What this rank was seen to do, for whoever explains the run."""
        assert self.recorder is not None, "the folder is open"
        if self.architecture == "collectives" and not self._follower.calls:
            self.architecture = "independent"
        self.recorder.member.counters["script"] = {"losses_seen": self._loss.count}
        self.recorder.member.counters["observed"] = {
            "architecture": self.architecture,
            "collectives": self._follower.calls,
            "has_ring": self._follower.has_ring,
            "clock": place.clock_name(),
            "launcher": self.identity.launcher,
        }
