"""Start members as processes of this machine, stream what they say, end all when one fails.

Knows commands, not training: the tunnel and containers start their members here too, with other
command lines.
"""

import os
import selectors
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import DeadlineError, Interrupted
from paceline.launch.failures import MemberFailures
from paceline.launch.interruption import INTERRUPT_SECONDS, Interruption
from paceline.launch.last_words import LastWords, ending, first_cause, is_settled
from paceline.launch.process import MemberCommand, Output, Process, end_all

TURN_SECONDS = 0.1


def supervise(
    commands: Sequence[MemberCommand],
    *,
    output: Output,
    tick: Callable[[], None] = lambda: None,
    deadline_seconds: float | None = None,
    started: Callable[[str, int], None] = lambda name, pid: None,
    logs: Path | None = None,
    failures: MemberFailures | None = None,
) -> None:
    """Run all members to their end; return when each has ended well.

    The first member to fail ends the others and is raised as MemberError, unless `failures` says
    that they continue without it. Ctrl-C and SIGTERM reach the workers, which have a while to end
    by themselves, and are raised as Interrupted. `tick` is called several times a second. With
    `logs` a file there keeps what each member printed. Nothing is left running, however this
    returns.
    """
    deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
    with Interruption() as interruption, _Members(output, logs, tick, failures) as members:
        for command in commands:
            started(command.name, members.start(command))
        while not members.done:
            members.turn()
            if interruption.received:
                members.interrupt(interruption)
                raise Interrupted(interruption.received[0])
            members.raise_first_cause()
            while failures is not None and failures.replacements_due:
                command = failures.replacements_due.pop(0)
                started(command.name, members.start(command))
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineError("run", deadline_seconds or 0.0, members.silent)
        members.raise_first_cause()  # the last may have failed since it was looked at


def share_cores(workers: int) -> list[tuple[int, ...]]:
    """An equal part of the cores for each worker; empty (no limit) where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // workers
    if each == 0 or workers == 1:
        return [()] * workers
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(workers)]


class _Members:
    """The members of one job while they run; all are ended when the block is left."""

    def __init__(
        self,
        output: Output,
        logs: Path | None,
        tick: Callable[[], None],
        failures: MemberFailures | None = None,
    ) -> None:
        self._output, self._logs, self._tick, self._failures = output, logs, tick, failures
        self._running: list[Process] = []
        self._selector = selectors.DefaultSelector()
        self._failed_at: float | None = None

    def __enter__(self) -> "_Members":
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        end_all(self._running)

    def start(self, command: MemberCommand) -> int:
        log = None if self._logs is None else self._logs / f"{command.name}.log"
        process = Process(command, self._output, LastWords(), log)
        self._running.append(process)
        for stream, pipe in process.pipes.items():
            self._selector.register(pipe, selectors.EVENT_READ, (process, stream))
        self._selector.register(process.ended, selectors.EVENT_READ, (process, ""))
        return process.popen.pid

    @property
    def done(self) -> bool:
        return all(process.done for process in self._running)

    @property
    def silent(self) -> list[str]:
        return [process.command.name for process in self._running if not process.done]

    def turn(self) -> None:
        """Wait a moment for output and endings, and take what came."""
        for key, _ in self._selector.select(timeout=TURN_SECONDS):
            process, stream = key.data
            still = process.read(stream) if stream else process.status is None
            if not still:
                self._selector.unregister(key.fileobj)
        for process in self._running:
            process.pass_on_parts()
        self._tick()

    def raise_first_cause(self) -> None:
        """Raise MemberError once a member has failed and it is clear which one failed first."""
        failed = [process for process in self._running if process.status]
        if not failed:
            return
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        for process in failed:
            process.read_all()
        endings = [
            ending(p.command.name, p.popen.returncode, p.ended_at or now, p.words) for p in failed
        ]
        running = [process for process in self._running if process.status is None]
        if self._failures is not None:
            others = [p.command.name for p in self._running if not p.status]
            endings = self._failures.fatal(endings, others)
            if not endings:
                self._failed_at = None
                return
        if is_settled(endings, len(running), now - self._failed_at):
            well = {p.command.name: p.ended_at or now for p in self._running if p.status == 0}
            raise first_cause(endings, well)

    def interrupt(self, interruption: Interruption) -> None:
        """Pass the signal on to the workers, and wait until they ended, for a while.

        Servers stay, because workers that save their weights may need them. A second signal ends
        the patience.
        """
        workers = [process for process in self._running if not process.command.serves]
        for process in self._running:
            if process.command.serves:
                process.silence()  # it would say that workers are lost, who were asked to go
        for process in workers:
            process.signal(interruption.received[0])
        until = time.monotonic() + INTERRUPT_SECONDS
        while any(not process.done for process in workers) and time.monotonic() < until:
            if len(interruption.received) > 1:
                break
            self.turn()
