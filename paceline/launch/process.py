"""One running member: its process, its output and its end. Ray's actors hold one too."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from paceline.launch.interruption import SIGNALS
from paceline.launch.last_words import LastWords
from paceline.record import cannot_write

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 5.0
LAST_WORDS_SECONDS = 1.0
READ_BYTES, READS = 1 << 16, 256
PART_SECONDS = 0.2
"""Wait for the rest of a line, so that members do not write into each other's."""


class MemberCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of one member."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    """Cores it may run on; all when empty."""

    descriptors: tuple[int, ...] = ()
    """Open files it inherits."""

    serves: bool = False
    """Others need it until they end: an interruption reaches it after them."""


Output = Callable[[str, str, bytes], None]
"""Called with a member's name, "stdout" or "stderr", and what it printed there: whole lines, each
with its end, or part of one after a pause."""


class Process:
    """A member that was started; `pipes` and `ended` are for the selector that watches it."""

    def __init__(
        self, command: MemberCommand, output: Output, words: LastWords, log: Path | None = None
    ) -> None:
        self.command, self.words = command, words
        self._output, self._silent = output, False
        self.ended_at: float | None = None
        self._log = None if log is None else open_log(log)
        parent = os.getpid()
        self.popen = subprocess.Popen(
            command.argv,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=command.descriptors,
            preexec_fn=lambda: _in_child(parent, command.cores),
        )
        self.ended = os.pidfd_open(self.popen.pid)
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self.pipes = {"stdout": self.popen.stdout, "stderr": self.popen.stderr}
        self._open = set(self.pipes)
        self._held = dict.fromkeys(self.pipes, b"")
        self._held_since = dict.fromkeys(self.pipes, 0.0)
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        status = self.popen.poll()
        if status is not None and self.ended_at is None:
            self.ended_at = time.monotonic()
        return status

    @property
    def done(self) -> bool:
        """It has ended, and what it printed has been passed on.

        A process that it left behind may hold its output open; that is not waited for.
        """
        if self.status is None or self.ended_at is None:
            return False
        return not self._open or time.monotonic() > self.ended_at + LAST_WORDS_SECONDS

    def read(self, stream: str) -> bool:
        """Pass on some of what was printed; False once the member has closed that stream."""
        return self._pass_on(stream) != 0

    def read_all(self) -> None:
        """Pass on what can be read without waiting."""
        for stream in sorted(self._open):
            for _ in range(READS):  # something left behind may print for ever
                if self._pass_on(stream) <= 0:
                    break

    def _pass_on(self, stream: str) -> int:
        """Return the number of bytes that came; 0 at the end of the stream, -1 if there is nothing
        yet."""
        try:
            content = os.read(self.pipes[stream].fileno(), READ_BYTES)
        except BlockingIOError:
            return -1
        if not content:
            self._open.discard(stream)
            self._say(stream, len(self._held[stream]))
            return 0
        self.words.add(stream, content, time.monotonic())
        self._keep(content)
        self._held[stream] += content
        # A carriage return ends a line too: a bar that is drawn over and over.
        whole = max(self._held[stream].rfind(b"\n"), self._held[stream].rfind(b"\r")) + 1
        self._say(stream, whole or (len(self._held[stream]) // READ_BYTES) * READ_BYTES)
        self._held_since[stream] = time.monotonic()
        return len(content)

    def pass_on_parts(self) -> None:
        """Pass on lines that have been without an end for a while."""
        for stream, held in self._held.items():
            if held and time.monotonic() > self._held_since[stream] + PART_SECONDS:
                self._say(stream, len(held))

    def _say(self, stream: str, num_bytes: int) -> None:
        content, self._held[stream] = self._held[stream][:num_bytes], self._held[stream][num_bytes:]
        if content and not self._silent:
            self._output(self.command.name, stream, content)

    def _keep(self, content: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(content)
        except OSError as error:
            if self._silent:
                return
            raise cannot_write(Path(self._log.name), error) from error

    def silence(self) -> None:
        """Write its output only to the log from now on; a log that cannot be written delays
        nothing."""
        self._silent = True

    def signal(self, number: int) -> None:
        """Tell the member and what it started, which share its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()
        os.close(self.ended)
        if self._log is not None:
            self._log.close()


def end_all(running: Sequence[Process]) -> None:
    """End what still runs, by SIGTERM and a grace of seconds, then by SIGKILL; nothing is left."""
    for process in running:
        process.silence()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            if process.status is None:
                process.signal(number)
        until = time.monotonic() + GRACE_SECONDS
        while any(p.status is None for p in running) and time.monotonic() < until:
            for process in running:
                process.read_all()  # a full pipe would keep it from ending
            time.sleep(0.01)
    for process in running:
        process.signal(signal.SIGKILL)  # what a member itself started and forgot
        process.read_all()
        process.close()


def open_log(path: Path) -> BinaryIO:
    """The log of a member, written to without delay."""
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError as error:
        raise cannot_write(path, error) from error


def _in_child(parent: int, cores: tuple[int, ...]) -> None:
    """Run between fork and exec: end with the launcher, even if it is killed; keep to own cores."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # A shell's background job ignores some and a thread of Ray blocks some, which is inherited;
    # but signals to a member come from us alone.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if cores:
        os.sched_setaffinity(0, cores)
