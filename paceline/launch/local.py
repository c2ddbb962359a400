"""Start members as processes of this machine, stream what they say, end all when one fails.

Knows commands, not training: the tunnel and containers start their members here too, with other
command lines.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from paceline.errors import DeadlineError, MemberError

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 5.0
LAST_LINES = 12
LAST_WORDS_SECONDS = 1.0


class MemberCommand(msgspec.Struct, frozen=True, kw_only=True):
    """One member as a command line."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    """Cores it may run on; all when empty."""

    descriptors: tuple[int, ...] = ()
    """Open files it inherits."""


Output = Callable[[str, str], None]
"""Called with a member's name and one line it printed."""


def supervise(
    commands: Sequence[MemberCommand],
    *,
    output: Output,
    tick: Callable[[], None] = lambda: None,
    deadline_seconds: float | None = None,
    started: Callable[[str, int], None] = lambda name, pid: None,
) -> None:
    """Run all members to their end; return when each has ended well.

    The first member to fail ends the others and is raised as MemberError. `tick` is called several
    times a second. Nothing is left running, however this returns.
    """
    running: list[Process] = []
    deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
    with selectors.DefaultSelector() as selector:
        try:
            for command in commands:
                process = Process(command, output)
                running.append(process)
                selector.register(process.pipe, selectors.EVENT_READ, process)
                started(command.name, process.popen.pid)
            while any(not process.done for process in running):
                for key, _ in selector.select(timeout=0.1):
                    if not key.data.read():
                        selector.unregister(key.fileobj)
                _raise_first_failure(running)
                tick()
                if deadline is not None and time.monotonic() > deadline:
                    missing = [p.command.name for p in running if not p.done]
                    raise DeadlineError("run", deadline_seconds or 0.0, missing)
        finally:
            end_all(running)


def share_cores(workers: int) -> list[tuple[int, ...]]:
    """An equal part of the cores for each worker; empty (no limit) where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // workers
    if each == 0 or workers == 1:
        return [()] * workers
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(workers)]


class Process:
    """One running member and the line it is in the middle of. Ray's actors hold one too."""

    def __init__(self, command: MemberCommand, output: Output) -> None:
        self.command = command
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._output, self._partial, self._closed = output, b"", False
        self._ended_at: float | None = None
        parent = os.getpid()
        self.popen = subprocess.Popen(
            command.argv,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=command.descriptors,
            preexec_fn=lambda: _in_child(parent, command.cores),
        )
        assert self.popen.stdout is not None
        self.pipe = self.popen.stdout
        os.set_blocking(self.pipe.fileno(), False)

    @property
    def done(self) -> bool:
        """It has ended, and what it printed has been passed on.

        A process that it left behind may hold its output open; that is not waited for.
        """
        if self.popen.poll() is None:
            return False
        self._ended_at = self._ended_at or time.monotonic()
        return self._closed or time.monotonic() > self._ended_at + LAST_WORDS_SECONDS

    def read(self) -> bool:
        """Pass on what was printed so far; False once the member has closed its output."""
        while content := self.pipe.read(65536):
            *lines, self._partial = (self._partial + content).split(b"\n")
            for line in lines:
                self._pass_on(line)
        if content is None:  # nothing more for now
            return True
        if self._partial:
            self._pass_on(self._partial)
            self._partial = b""
        self._closed = True
        return False

    def _pass_on(self, line: bytes) -> None:
        # A carriage return rewrites a line on a terminal; here only its last state matters.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        self.last_lines.append(text)
        self._output(self.command.name, text)


def _in_child(parent: int, cores: tuple[int, ...]) -> None:
    """Between fork and exec: die with the launcher, even when it is killed; keep to own cores."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if cores:
        os.sched_setaffinity(0, cores)


def _raise_first_failure(running: Sequence[Process]) -> None:
    failed = [p for p in running if p.popen.poll() not in (None, 0)]
    if not failed:
        return
    # Members that lose a peer fail too, within moments; the one that said an error of ours, or was
    # killed from outside, is the cause. Wait a moment so that every exit status is known.
    time.sleep(0.2)
    for process in running:
        if not process._closed:
            process.read()
    failed = [p for p in running if p.popen.poll() not in (None, 0)]
    first = min(failed, key=lambda p: blame(p.popen.returncode, p.last_lines))
    raise MemberError(first.command.name, first.popen.returncode, list(first.last_lines))


def blame(exit_status: int, last_lines: Sequence[str]) -> int:
    """Order of suspicion: killed or given bad input, then the rest, then those that lost a peer."""
    words = "\n".join(last_lines)
    if "Connection closed by peer" in words or "Connection reset by peer" in words:
        return 2
    return 0 if exit_status < 0 or exit_status == 2 else 1


def end_all(running: Sequence[Process]) -> None:
    for signal_number, grace in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        alive = [p for p in running if p.popen.poll() is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal_number)
        until = time.monotonic() + grace
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, until - time.monotonic()))
    for process in running:
        # What a member itself started and forgot shares its process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        process.pipe.close()
