"""Faults that happen on purpose: at a step of a member it is killed, stopped for a while, cut off.

The launcher does it, between two looks at its members. A fault that could not happen is refused
before anything starts; one that did not, because the job ended first, is told at the end.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from paceline import spec
from paceline.errors import FaultError, SpecError, suggest
from paceline.record import RecordedEvent, RunFolder
from paceline.record.following import StepCounter

POSSIBLE = {
    "here": ("kill", "pause"),
    "tunnel": ("kill", "pause", "cut", "slow", "link"),
    "predict": (),
}
"""Engine -> what members can suffer there; cables and emulated devices are the tunnel's."""

Undo = Callable[[], None]
Cut = Callable[[str], Undo]
"""Cuts a member's host off; what it returns joins it again."""


def check_faults(experiment: spec.Experiment) -> None:
    """Raise SpecError for a fault that would silently not happen."""
    possible = POSSIBLE[experiment.engine]
    workers, servers = experiment.cluster.workers, experiment.num_servers
    members = [f"worker{n}" for n in range(workers)] + [f"server{n}" for n in range(servers)]
    for fault in experiment.faults:
        place = f"[[faults]], {fault.kind} at step {fault.at_step}"
        if fault.member not in members:
            problem = f'there is no member "{fault.member}".'
            raise SpecError(place, problem, suggest(fault.member, members))
        if fault.kind not in possible:
            problem = f"{fault.kind} does not happen on the engine {experiment.engine}."
            choice = f"choose {' or '.join(possible)}, or add" if possible else "add"
            raise SpecError(place, problem, f"{choice} --on tunnel.")
        steps = experiment.workload.steps
        if steps and fault.at_step >= steps:
            problem = f"the run ends after {steps} steps."
            raise SpecError(place, problem, f"write a step below {steps}.")
    outside = experiment.cluster.container or experiment.cluster.launcher != "local"
    if experiment.faults and outside:
        fix = "leave out --container and --launcher."
        raise SpecError("[[faults]]", "members are not processes of this launcher.", fix)


class Faults:
    """Carries out the faults of one run, through all its lives; call it several times a second."""

    def __init__(
        self,
        faults: Iterable[spec.Fault],
        folder: RunFolder,
        *,
        cut: Cut | None = None,
        dilation: float = 1.0,
        by_device: Iterable[spec.Fault] = (),
    ) -> None:
        """`by_device`: those that an emulated device carries out by itself, at the very step; here
        they are only written down."""
        self._folder, self._cut, self._dilation = folder, cut, dilation
        self._due = sorted(faults, key=lambda fault: fault.at_step)
        self._by_device = list(by_device)
        self._missed: list[spec.Fault] = []
        self._pids: dict[str, int] = {}
        self._done: dict[str, int] = {}
        """Worker -> the steps it has done."""
        self._counters: list[StepCounter] = []
        self._undo: list[tuple[float, Undo]] = []

    def started(self, name: str, pid: int) -> None:
        """A member's process, which leads a group of its own."""
        self._pids[name] = pid
        if name.startswith("worker") and (self._due or self._by_device):
            self._counters.append(StepCounter(self._folder, self._counting(name), name))

    def _counting(self, name: str) -> Callable[[int], None]:
        def count(steps: int) -> None:
            self._done[name] = steps

        return count

    def __call__(self) -> None:
        now = time.monotonic()
        over = [undo for until, undo in self._undo if until <= now]
        self._undo = [(until, undo) for until, undo in self._undo if until > now]
        for undo in over:
            undo()
        if not (self._due or self._by_device):
            return
        self._count()
        for fault in [fault for fault in self._due if self._steps_of(fault) >= fault.at_step]:
            if self._is_there(fault.member):  # one that has ended suffers nothing any more
                self._due.remove(fault)
                self._happen(fault)

    def _count(self) -> None:
        """Look how far members are, and write down what their devices did there."""
        for counter in self._counters:
            counter()
        there = [fault for fault in self._by_device if self._steps_of(fault) >= fault.at_step]
        for fault in there:
            self._by_device.remove(fault)
            moment = self._moment_of(fault)
            if moment is None:
                self._missed.append(fault)
            else:
                self._note(fault, fault.at_step, moment)

    def _moment_of(self, fault: spec.Fault) -> float | None:
        """Return when a device came to a step; None if its run began after it."""
        steps = self._folder.all_steps(fault.member)
        before = [step.end_seconds for step in steps if step.step == fault.at_step - 1]
        began = [step.start_seconds for step in steps if step.step == fault.at_step]
        return next(iter((*before, *began)), None)

    def _steps_of(self, fault: spec.Fault) -> int:
        """A server has no steps of its own: those of the worker that is furthest are meant."""
        if fault.member in self._done or fault.member.startswith("worker"):
            return self._done.get(fault.member, -1)
        return max(self._done.values(), default=-1)

    def _happen(self, fault: spec.Fault) -> None:
        steps, pid = self._steps_of(fault), self._pids[fault.member]
        self._note(fault, steps, time.monotonic() / self._dilation)
        if fault.kind == "kill":
            self._signal(pid, signal.SIGKILL)
            return
        if fault.kind == "pause":
            self._signal(pid, signal.SIGSTOP)
            undo: Undo = lambda: self._signal(pid, signal.SIGCONT)  # noqa: E731
        else:
            assert self._cut is not None, "checked before the run"
            undo = self._cut(fault.member)
        self._undo.append((time.monotonic() + fault.seconds * self._dilation, undo))

    def _is_there(self, member: str) -> bool:
        try:
            os.killpg(self._pids[member], 0)
        except ProcessLookupError:
            return False
        return True

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)

    def _note(self, fault: spec.Fault, steps: int, moment: float) -> None:
        text, member = f"fault: {fault.words}", fault.member
        event = RecordedEvent(
            time_seconds=moment, member=member, kind="fault", text=text, step=steps
        )
        self._folder.add_event(event)

    def new_life(self) -> None:
        """All members were ended and will be started again: what was paused is gone."""
        for _, undo in self._undo:
            undo()
        self._undo, self._counters = [], []
        self._pids, self._done = {}, {}

    def check_happened(self) -> None:
        """Raise FaultError for what was asked and did not happen: the run shows nothing then."""
        self._count()
        if missing := [*self._due, *self._by_device, *self._missed]:
            missed = ", ".join(fault.words for fault in missing)
            raise FaultError(f"the run ended before this happened: {missed}.")
