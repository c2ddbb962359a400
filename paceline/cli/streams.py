"""What members print, on the launcher's own stdout and stderr: whole, unwrapped, uninterpreted.

Worker 0's words come through as they are, so that what is piped from a job is what its script
prints without us. Lines of other members carry their name in front.
"""

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

PLAIN = "worker0"
LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
ERASE = b"\x1b[K"


class MemberStreams:
    """An Output that writes to this process's streams."""

    def __init__(
        self,
        *,
        stdout: bool = True,
        plain: str = PLAIN,
        paused: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`stdout` is false where it is kept for something else: all goes to stderr then.

        `plain` names the member without a prefix; `paused` clears the way on a terminal.
        """
        errors = _Target(sys.stderr, _Line())
        # On one terminal both streams write to the same line.
        together = sys.stdout.isatty() and sys.stderr.isatty()
        out = _Target(sys.stdout, errors.line if together else _Line())
        self._targets = {"stderr": errors, "stdout": out if stdout else errors}
        self._plain, self._paused = plain, paused

    def __call__(self, member: str, stream: str, content: bytes) -> None:
        prefix = "" if member == self._plain else f"{member} | "
        with self._paused():
            self._targets[stream].write(f"{member} {stream}", prefix, content)


class _Line:
    """The line that was written to last."""

    def __init__(self) -> None:
        self.writer, self.end = "", b"\n"
        """Whose it is, and what it ended with; nothing when it is still open."""


class _Target:
    """One stream that several members write to, line by line."""

    def __init__(self, file: TextIO, line: _Line) -> None:
        self._file, self.line = file, line
        self._dim = file.isatty()

    def write(self, writer: str, prefix: str, content: bytes) -> None:
        last, parts = self.line, []
        if writer != last.writer:
            parts.append(self._take_over())
        for line in LINE.findall(content):
            continues = writer == last.writer and not last.end
            ends_return = writer == last.writer and last.end == b"\r" and line == b"\n"
            if prefix and not continues and not ends_return and line != b"\r":
                shown = f"\x1b[2m{prefix}\x1b[0m" if self._dim else prefix
                parts.append(shown.encode())
            parts.append(line)
            last.writer, last.end = writer, line[-1:] if line[-1:] in (b"\r", b"\n") else b""
        self._file.flush()  # what we said ourselves comes first
        self._file.buffer.write(b"".join(parts))
        self._file.buffer.flush()

    def _take_over(self) -> bytes:
        """Make room on a line that another member has left open, or would write over."""
        if not self.line.end:
            return b"\n"
        return ERASE if self.line.end == b"\r" and self._dim else b""
