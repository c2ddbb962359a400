"""A job that stands still says so: since when, at which step, who is stopped, who waits for whom,
where each member is just now, and what the likely cause is.

Steps are followed in the members' own files, so this works for every architecture and for any
script. What is called still follows the times that steps took before; no member is ended for it.
"""

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping

import psutil

from paceline.diagnose import thread_stacks
from paceline.diagnose.connections import own_addresses, unheard
from paceline.diagnose.stall_causes import likely_cause
from paceline.record import RecordedEvent, RunFolder
from paceline.record.following import StepCounter

LEAST_SECONDS = 5.0
"""Members write their steps once a second, and a machine may be busy."""

USUAL_STEPS = 5.0
"""A worker stands still if its step takes this many times as long as steps took before."""

SURE_SECONDS, SURE_STEPS = 1.5, 2.5
"""The same where it need not be guessed: a member is stopped, or bytes are sent again in vain."""

LOOK_SECONDS, SAMPLE_SECONDS = 0.4, 1.0
"""Seconds between two looks at the steps, and at the share of a core that each member uses."""

BUSY_FRACTION = 0.2
"""Share of a core; a member that uses more is computing."""

Say = Callable[[str], None]


class _Worker:
    """Progress of one worker: its step, since when, and the time of a step by its own record."""

    def __init__(self, folder: RunFolder, name: str, dilation: float) -> None:
        self.steps, self.since, self.usual = 0, time.monotonic(), 0.0
        self._end, self._dilation = 0.0, dilation
        self.follow = StepCounter(folder, self._count, name)

    def _count(self, steps: int) -> None:
        assert self.follow.last is not None, "it was counted"
        end = self.follow.last.end_seconds * self._dilation
        if 0 < self.steps < steps:
            self.usual = max(0.7 * self.usual, (end - self._end) / (steps - self.steps))
        self.steps, self.since, self._end = steps, time.monotonic(), end

    def still_seconds(self, least_seconds: float, usual_steps: float) -> float:
        """Return how long it has stood still; 0 while that is usual, and before its first step."""
        still = time.monotonic() - self.since
        return still if self.steps and still > max(least_seconds, usual_steps * self.usual) else 0.0


class Stalls:
    """Watches the members of one life; call it several times a second."""

    def __init__(
        self, folder: RunFolder, say: Say, dilation: float = 1.0, lost: Iterable[str] = ()
    ) -> None:
        """`lost`: failed members without which the others continue, as they become known."""
        self._folder, self._say, self._dilation, self._lost = folder, say, dilation, lost
        self._last = folder.experiment().workload.steps
        """Number of steps of the job; 0 if it is not known."""
        self._processes: dict[str, psutil.Process] = {}
        self._workers: dict[str, _Worker] = {}
        self._told: str | None = None
        self._looked_at = self._sampled_at = 0.0
        self._busy: dict[str, float] = {}
        self._used: dict[str, tuple[float, float]] = {}

    def started(self, name: str, pid: int) -> None:
        self._processes[name] = psutil.Process(pid)
        if name.startswith("worker"):
            self._workers[name] = _Worker(self._folder, name, self._dilation)

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        for name in self._lost:  # nobody waits for it, and where it was tells nothing
            self._workers.pop(name, None)
        if now - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at, self._busy = now, self._busy_fractions(now)
        busy = self._busy
        for worker in self._workers.values():
            worker.follow()
        still = self._still(SURE_SECONDS, SURE_STEPS, busy)
        if not still or all(map(self._is_done, self._workers.values())):
            self._told = None
            return
        if self._told is not None:
            return
        if not self._is_sure(busy):
            still = self._still(LEAST_SECONDS, USUAL_STEPS, busy)
        text = self._cause(still, busy) if still else None
        if text is not None:
            self._told = text
            self._tell(text, max(still.values()), {name: self._processes[name] for name in busy})

    def _still(
        self, least_seconds: float, usual_steps: float, alive: Container[str]
    ) -> dict[str, float]:
        """Living workers that stand still, and for how long.

        Who is ahead of one that makes its steps does not: it has done all of its own, which a
        script does not tell, or waits as its mode has it.
        """
        there = {name: w for name, w in self._workers.items() if name in alive and w.steps}
        found = {
            name: seconds
            for name, worker in there.items()
            if (seconds := worker.still_seconds(least_seconds, usual_steps))
            and not self._is_done(worker)
        }
        moving = [worker.steps for name, worker in there.items() if name not in found]
        slowest = min(moving, default=math.inf)
        return {name: seconds for name, seconds in found.items() if there[name].steps < slowest}

    def _is_done(self, worker: _Worker) -> bool:
        """Return whether it has done all steps, so that only saving and leaving remain."""
        return 0 < self._last <= worker.steps

    def _is_sure(self, alive: Iterable[str]) -> bool:
        """Return whether a member is stopped, or a connection does not answer."""
        return any(
            self._state(name) == psutil.STATUS_STOPPED or unheard(self._processes[name])
            for name in alive
        )

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
        """Return the report; None while a member computes, which may be an evaluation."""
        states = {name: self._state(name) for name in busy}
        stopped = [name for name, state in states.items() if state == psutil.STATUS_STOPPED]
        if stopped:
            waiting = sorted(set(still) - set(stopped))
            return f"{_listed(stopped)} stopped (SIGSTOP){_waiting(waiting)}"
        # One that wants to compute may not get a core on a crowded machine.
        wants = [name for name, state in states.items() if state == psutil.STATUS_RUNNING]
        if wants or any(fraction > BUSY_FRACTION for fraction in busy.values()):
            return None
        helped = [name for name in busy if self._has_stopped_helper(name)]
        if helped:
            processes = _listed([f"a process that {name} started" for name in helped])
            return f"{processes} stopped (SIGSTOP){_waiting(sorted(still))}"
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
        return f"every member is idle at step {least}, and nothing arrives"

    def _state(self, name: str) -> str:
        try:
            return str(self._processes[name].status())
        except psutil.NoSuchProcess:
            return str(psutil.STATUS_DEAD)

    def _has_stopped_helper(self, name: str) -> bool:
        """A loader's process, say."""
        try:
            helpers = self._processes[name].children(recursive=True)
            return any(helper.status() == psutil.STATUS_STOPPED for helper in helpers)
        except psutil.NoSuchProcess:
            return False

    def _tell(self, text: str, seconds: float, alive: Mapping[str, psutil.Process]) -> None:
        steps = {name: worker.steps for name, worker in self._workers.items()}
        usual = max(worker.usual for worker in self._workers.values())
        text = f"no step for {seconds:.0f} s, where one takes {usual:.2g} s: {text}"
        answering = {n: p for n, p in alive.items() if self._state(n) != psutil.STATUS_STOPPED}
        found = thread_stacks.ask(self._folder.path, answering)
        ends = {name: unheard(process) for name, process in alive.items()}
        owners = {where: name for name in alive for where in own_addresses(alive[name])}
        cause = likely_cause(steps, found, ends, owners)
        text += f"; likely: {cause}" if cause else ""
        now, most = time.monotonic() / self._dilation, max(steps.values())
        event = RecordedEvent(
            time_seconds=now, member="launcher", kind="stall", text=text, step=most
        )
        self._folder.add_event(event)
        lines = [f"  {name} is in {stack.words}" for name, stack in sorted(found.items())]
        if lines:
            lines.append(f"  whole stacks: {thread_stacks.path_of(self._folder.path, '*')}")
        self._say("\n".join((text, *lines)))


def _listed(names: list[str], one: str = "is", several: str = "are") -> str:
    return f"{', '.join(names)} {one if len(names) == 1 else several}"


def _waiting(names: list[str]) -> str:
    return f", and {_listed(names, 'waits', 'wait')}" if names else ""
