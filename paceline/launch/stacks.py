"""Where a member is just now: its stacks, asked for by a signal, also while it waits in C code.

A member says beforehand that it will answer, in a file of its own beside its log; the default of
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
"""One that neither scripts nor libraries are known to use."""

ANSWER_SECONDS = 1.0
WRITES_SECONDS = 0.1
"""From the first line of an answer to its last."""

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_NOT_ITS_OWN = ("/paceline/", "/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


class Frame(NamedTuple):
    """One line of a stack."""

    function: str
    file: str
    line: int

    @property
    def words(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"

    @property
    def is_the_scripts(self) -> bool:
        return not any(part in self.file for part in _NOT_ITS_OWN)


class Stack(NamedTuple):
    """The main thread's, innermost first."""

    frames: tuple[Frame, ...]

    @property
    def words(self) -> str:
        """The innermost line, and the innermost line of the script if that is another."""
        inner = self.frames[0]
        own = next((frame for frame in self.frames if frame.is_the_scripts), inner)
        return inner.words if own is inner else f"{inner.words}, called from {own.words}"

    @property
    def place(self) -> Frame | None:
        """Where in the script it is."""
        return next((frame for frame in self.frames if frame.is_the_scripts), None)

    def is_in(self, *functions: str) -> bool:
        return any(frame.function in functions for frame in self.frames)


def path_of(run: Path, member: str) -> Path:
    return run / "logs" / f"{member}.stacks"


def answer(run: Path, member: str) -> None:
    """From now on this process writes its stacks when it is asked to."""
    if signal.getsignal(SIGNAL) != signal.SIG_DFL:  # the script's own
        return
    path = path_of(run, member)
    with contextlib.suppress(OSError):  # a full disk ends no training
        path.parent.mkdir(exist_ok=True)
        # It stays open: the signal's handler must not do more than write.
        file = path.open("w", buffering=1)
        main = threading.main_thread().ident or 0
        file.write(f"pid {os.getpid()} main 0x{main:016x}\n")
        faulthandler.register(SIGNAL, file=file, all_threads=True)


def ask(run: Path, processes: Mapping[str, psutil.Process]) -> dict[str, Stack]:
    """Where these members are; those that do not answer are left out."""
    asked = {}
    for name, process in processes.items():
        path = path_of(run, name)
        with contextlib.suppress(OSError, psutil.Error):
            first = path.read_text().splitlines()[0].split()
            pid = int(first[1])
            if pid in (process.pid, *(child.pid for child in process.children(recursive=True))):
                asked[name] = path, path.stat().st_size, first[3]
                os.kill(pid, SIGNAL)
    until = time.monotonic() + ANSWER_SECONDS
    while any(path.stat().st_size == size for path, size, _ in asked.values()):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    time.sleep(WRITES_SECONDS if asked else 0.0)
    found = {}
    for name, (path, size, main) in asked.items():
        with contextlib.suppress(OSError):
            stack = _parsed(path.read_bytes()[size:].decode(errors="replace"), main)
            if stack is not None:
                found[name] = stack
    return found


def _parsed(text: str, main: str) -> Stack | None:
    """The main thread's among those of all threads."""
    frames: list[Frame] = []
    is_main = False
    for line in text.splitlines():
        if line.startswith(("Thread", "Current thread")):
            is_main = main in line
        elif is_main and (match := _FRAME.fullmatch(line)):
            frames.append(Frame(match["function"], match["file"], int(match["line"])))
    return Stack(tuple(frames)) if frames else None
