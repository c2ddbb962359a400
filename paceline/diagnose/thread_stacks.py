"""Stacks of a running member, requested by a signal; it answers also while it waits in C code.

A member says beforehand that it will answer, in a file next to its log; the default of
the signal would end one that does not.
"""

import contextlib
import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

SIGNAL = signal.SIGRTMIN + 7
"""A signal that neither scripts nor libraries are known to use."""

ANSWER_SECONDS = 3.0
"""A member may have to wait for a core before it answers."""

WRITES_SECONDS = 0.1
"""An answer that has not grown for so long is whole."""

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_NOT_ITS_OWN = ("/paceline/", "/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


class Frame(NamedTuple):
    """A function on a stack, and the line it is at."""

    function: str
    file: str
    line: int

    @property
    def words(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"

    @property
    def is_the_scripts(self) -> bool:
        return not any(part in self.file for part in _NOT_ITS_OWN)


class ThreadStack(NamedTuple):
    """The stack of the main thread, innermost first."""

    frames: tuple[Frame, ...]

    @property
    def words(self) -> str:
        """The innermost line, and the innermost line of the script if that is another."""
        inner = self.frames[0]
        own = next((frame for frame in self.frames if frame.is_the_scripts), inner)
        return inner.words if own is inner else f"{inner.words}, called from {own.words}"

    @property
    def place(self) -> Frame | None:
        """The line of the script that is running."""
        return next((frame for frame in self.frames if frame.is_the_scripts), None)


def path_of(run: Path, member: str) -> Path:
    return run / "logs" / f"{member}.stacks"


def answer(run: Path, member: str) -> None:
    """Let this process write its stacks when it is asked to."""
    if signal.getsignal(SIGNAL) != signal.SIG_DFL:  # the script's own
        return
    path = path_of(run, member)
    with contextlib.suppress(OSError):  # a full disk ends no training
        path.parent.mkdir(exist_ok=True)
        # It stays open: the signal's handler must not do more than write.
        file = path.open("w", buffering=1)
        main = threading.main_thread().ident or 0
        faulthandler.register(SIGNAL, file=file, all_threads=True)
        # Only now: whoever reads this may ask at once, and would end one that is not prepared.
        file.write(f"pid {os.getpid()} main 0x{main:016x}\n")


def ask(run: Path, processes: Mapping[str, psutil.Process]) -> dict[str, ThreadStack]:
    """Return the stacks of these members; those that do not answer are left out."""
    asked = {}
    for name, process in processes.items():
        path = path_of(run, name)
        # One that has just made its file has not yet written into it: it answers another time.
        with contextlib.suppress(OSError, psutil.Error, IndexError):
            first = path.read_text().splitlines()[0].split()
            pid = int(first[1])
            if pid not in (process.pid, *(child.pid for child in process.children(recursive=True))):
                continue
            if psutil.Process(pid).status() != psutil.STATUS_STOPPED:  # which answers nobody
                asked[name] = path, path.stat().st_size, first[3]
                os.kill(pid, SIGNAL)
    _wait_for_answers({path: size for path, size, _ in asked.values()})
    found = {}
    for name, (path, size, main) in asked.items():
        with contextlib.suppress(OSError):
            stack = _parsed(path.read_bytes()[size:].decode(errors="replace"), main)
            if stack is not None:
                found[name] = stack
    return found


def _wait_for_answers(sizes: dict[Path, int]) -> None:
    """Return once each of these files has grown, and none of them for a while."""
    last, grew_at = dict(sizes), time.monotonic()
    until = grew_at + (ANSWER_SECONDS if sizes else 0.0)
    while (now := time.monotonic()) < until:
        if (seen := {path: path.stat().st_size for path in sizes}) != last:
            last, grew_at = seen, now
        answered = all(last[path] > size for path, size in sizes.items())
        if answered and now > grew_at + WRITES_SECONDS:
            return
        time.sleep(0.02)


def _parsed(text: str, main: str) -> ThreadStack | None:
    """The main thread's among those of all threads."""
    frames: list[Frame] = []
    is_main = False
    for line in text.splitlines():
        if line.startswith(("Thread", "Current thread")):
            is_main = main in line
        elif is_main and (match := _FRAME.fullmatch(line)):
            frames.append(Frame(match["function"], match["file"], int(match["line"])))
    return ThreadStack(tuple(frames)) if frames else None
