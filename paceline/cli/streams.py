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
        errors = _Target(sys.stderr)
        self._targets = {"stderr": errors, "stdout": _Target(sys.stdout) if stdout else errors}
        self._plain, self._paused = plain, paused

    def __call__(self, member: str, stream: str, content: bytes) -> None:
        prefix = "" if member == self._plain else f"{member} | "
        with self._paused():
            self._targets[stream].write(f"{member} {stream}", prefix, content)


class _Target:
    """One stream that several members write to, line by line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._dim = file.isatty()
        self._writer, self._end = "", b"\n"
        """Who wrote last, and what that ended with; nothing when its line is still open."""

    def write(self, writer: str, prefix: str, content: bytes) -> None:
        parts: list[bytes] = []
        if writer != self._writer:
            parts.append(self._take_over())
        for line in LINE.findall(content):
            continues = writer == self._writer and not self._end
            ends_return = writer == self._writer and self._end == b"\r" and line == b"\n"
            if prefix and not continues and not ends_return and line != b"\r":
                shown = f"\x1b[2m{prefix}\x1b[0m" if self._dim else prefix
                parts.append(shown.encode())
            parts.append(line)
            self._writer, self._end = writer, line[-1:] if line[-1:] in (b"\r", b"\n") else b""
        self._file.flush()  # what we said ourselves comes first
        self._file.buffer.write(b"".join(parts))
        self._file.buffer.flush()

    def _take_over(self) -> bytes:
        """Make room on a line that another member has left open, or would write over."""
        if not self._end:
            return b"\n"
        return ERASE if self._end == b"\r" and self._dim else b""
