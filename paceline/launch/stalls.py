"""A job that stands still says so: since when, at which step, who is stopped, who waits for whom,
where each member is just now, and what the likely cause is.

Steps are followed in the members' own files, so this works for every architecture and for any
script. What is called still follows the times that steps took before; nobody is ended for it.
"""

import time
from collections.abc import Callable, Mapping

import psutil

from paceline.launch import stacks
from paceline.launch.causes import likely_cause
from paceline.launch.connections import unheard
from paceline.record import Event, RunFolder
from paceline.record.following import StepCounter

LEAST_SECONDS = 5.0
"""Members write their steps once a second, and a machine may be busy."""

USUAL_STEPS = 5.0
"""Still: so many times as long as steps took before."""

BUSY_FRACTION = 0.2
"""Of a core: who uses more computes something."""

Say = Callable[[str], None]


class _Worker:
    """How far one worker is, and how long its steps take as seen from here."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self.steps, self.since, self.usual = 0, time.monotonic(), 0.0
        self.follow = StepCounter(folder, self._count, name)

    def _count(self, steps: int) -> None:
        now = time.monotonic()
        if 0 < self.steps < steps:
            self.usual = max(0.7 * self.usual, (now - self.since) / (steps - self.steps))
        self.steps, self.since = steps, now

    def still_seconds(self) -> float:
        """How long it has stood still; 0 while that is nothing unusual, or before its first."""
        still = time.monotonic() - self.since
        return still if self.steps and still > max(LEAST_SECONDS, USUAL_STEPS * self.usual) else 0.0


class Stalls:
    """Watches the members of one life; call it several times a second."""

    def __init__(self, folder: RunFolder, say: Say, dilation: float = 1.0) -> None:
        self._folder, self._say, self._dilation = folder, say, dilation
        self._processes: dict[str, psutil.Process] = {}
        self._workers: dict[str, _Worker] = {}
        self._told: str | None = None
        self._looked_at = 0.0
        self._used: dict[str, tuple[float, float]] = {}

    def started(self, name: str, pid: int) -> None:
        self._processes[name] = psutil.Process(pid)
        if name.startswith("worker"):
            self._workers[name] = _Worker(self._folder, name)

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        busy = self._busy_fractions(now)
        for worker in self._workers.values():
            worker.follow()
        still = {n: s for n, w in self._workers.items() if (s := w.still_seconds()) and n in busy}
        if not still:
            self._told = None
            return
        text = self._cause(still, busy)
        if text is not None and self._told is None:
            self._told = text
            self._tell(text, max(still.values()), {name: self._processes[name] for name in busy})

    def _busy_fractions(self, now: float) -> dict[str, float]:
        """Share of a core that each living member used since the last look."""
        found = {}
        for name, process in self._processes.items():
            try:
                times = process.cpu_times()
                gone = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            except psutil.NoSuchProcess:
                continue
            if gone:
                continue
            used = times.user + times.system
            then, before = self._used.get(name, (now, used))
            self._used[name] = now, used
            found[name] = (used - before) / (now - then) if now > then else 1.0
        return found

    def _cause(self, still: Mapping[str, float], busy: Mapping[str, float]) -> str | None:
        """In words; None while somebody computes, which may be an evaluation."""
        states = {name: self._state(name) for name in busy}
        stopped = [name for name, state in states.items() if state == psutil.STATUS_STOPPED]
        if stopped:
            waiting = sorted(set(still) - set(stopped))
            return f"{_listed(stopped)} stopped (SIGSTOP){_waiting(waiting)}"
        # One that wants to compute may not get a core on a crowded machine.
        wants = [name for name, state in states.items() if state == psutil.STATUS_RUNNING]
        if wants or any(fraction > BUSY_FRACTION for fraction in busy.values()):
            return None
        disk = [name for name, state in states.items() if state == psutil.STATUS_DISK_SLEEP]
        if disk:
            return f"{_listed(disk)} waiting for a disk"
        there = {name: worker for name, worker in self._workers.items() if name in busy}
        least = min(worker.steps for worker in there.values())
        behind = [name for name, worker in there.items() if worker.steps == least]
        if len(behind) < len(there):
            waiting = sorted(set(still) - set(behind))
            return f"{_listed(behind)} behind, at step {least}, and idle{_waiting(waiting)}"
        gone = sorted(self._workers.keys() - busy)
        if gone:
            steps = ", ".join(f"{name} after {self._workers[name].steps} steps" for name in gone)
            return f"{steps} {'has' if len(gone) == 1 else 'have'} ended{_waiting(sorted(still))}"
        return f"every member is idle at step {least}: nothing arrives on the network"

    def _state(self, name: str) -> str:
        try:
            return str(self._processes[name].status())
        except psutil.NoSuchProcess:
            return str(psutil.STATUS_DEAD)

    def _tell(self, text: str, seconds: float, alive: Mapping[str, psutil.Process]) -> None:
        steps = {name: worker.steps for name, worker in self._workers.items()}
        usual = max(worker.usual for worker in self._workers.values())
        text = f"no step for {seconds:.0f} s, where one takes {usual:.2g} s: {text}"
        found = stacks.ask(self._folder.path, alive)
        ends = {name: unheard(process) for name, process in alive.items()}
        cause = likely_cause(steps, found, ends)
        text += f"; likely: {cause}" if cause else ""
        now, most = time.monotonic() / self._dilation, max(steps.values())
        event = Event(time_seconds=now, member="launcher", kind="stall", text=text, step=most)
        self._folder.add_event(event)
        lines = [f"  {name} is in {stack.words}" for name, stack in sorted(found.items())]
        if lines:
            lines.append(f"  whole stacks: {stacks.path_of(self._folder.path, '*')}")
        self._say("\n".join((text, *lines)))


def _listed(names: list[str], one: str = "is", several: str = "are") -> str:
    return f"{', '.join(names)} {one if len(names) == 1 else several}"


def _waiting(names: list[str]) -> str:
    return f", and {_listed(names, 'waits', 'wait')}" if names else ""
