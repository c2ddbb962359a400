"""The last lines that ended members printed, and which member was the cause.

When one member fails, the others lose a peer and fail too, within moments and with more words. The
one to name is the first that failed for a reason of its own.
"""

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import msgspec

from paceline.errors import MemberError

LAST_LINES = 12
LINE_BYTES = 1 << 12
"""Bytes that are kept of a line that does not end."""

COMPLAINTS = ("Traceback (most recent call last):", "error: ", "terminate called")
"""First words of an error of a Python, a Paceline and a C++ program."""

TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""Prefix that torch puts before each line of a traceback once there is a group."""

ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "no answer within",
    " was lost",
    "store is gone",
    "lost the job's store",
    "has closed the connection",
    "use transport=tcp between containers",
    "failed to recv",
    "recvValue failed",
    "sendBytes failed",
    "client socket has timed out",
    "Timed out waiting",
)
"""Words of a member that failed because it lost another one."""

NAMES_MISSING = re.compile(r"no answer within .*; missing: (?!unknown)")
"""The echo that knows whose it is: of all that wait for a silent member, who says so is named."""

SETTLE_SECONDS = 0.2
"""Wait after a failure, until every member that failed in the same moment is known to have."""

LEAVE_SECONDS = 2.0
"""Others may notice that a member leaves before its process has ended."""

ECHO_SECONDS = 10.0
"""Wait while all failed members only lost another one: the cause may not have ended yet."""


class LastWords:
    """The last lines that a member printed, and when the last complaint among them began."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, float]] = deque(maxlen=LAST_LINES)
        self._complaint: deque[str] = deque(maxlen=LAST_LINES)
        self._partial: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        self.complained_at: float | None = None

    def add(self, stream: str, content: bytes, now: float) -> None:
        *lines, rest = (self._partial[stream] + content).split(b"\n")
        self._partial[stream] = rest[-LINE_BYTES:]
        for line in lines:
            self._add(stream, line, now)

    def end(self, now: float) -> None:
        """Take the lines that no line break ended."""
        for stream, partial in self._partial.items():
            if partial:
                self._add(stream, partial, now)
            self._partial[stream] = b""

    def _add(self, stream: str, line: bytes, now: float) -> None:
        # A carriage return rewrites a line on a terminal; here only its last state matters.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        text = TORCH_PREFIX.sub("", text)
        self._lines.append((text, now))
        if stream != "stderr":
            return
        if text.startswith(COMPLAINTS):
            self._complaint.clear()
            self.complained_at = now
        if self.complained_at is not None:
            self._complaint.append(text)

    @property
    def lines(self) -> list[str]:
        return [text for text, _ in self._lines]

    @property
    def complaint(self) -> list[str]:
        """The lines from the beginning of the last complaint on; empty without one."""
        return list(self._complaint)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one member."""

    name: str
    status: int
    """Exit status; below zero, the signal that ended it."""

    time: float
    """The moment it began to fail: its complaint comes before its end, and before others notice."""

    lines: list[str]
    complaint: list[str]

    @property
    def said(self) -> str:
        return "\n".join(self.complaint or self.lines)

    @property
    def is_echo(self) -> bool:
        """Return whether it failed because it lost another member."""
        return any(words in self.said for words in ECHOES)

    @property
    def names_missing(self) -> bool:
        return NAMES_MISSING.search(self.said) is not None


def ending(name: str, status: int, ended_at: float, words: LastWords) -> Ending:
    words.end(ended_at)
    began = ended_at if words.complained_at is None else min(ended_at, words.complained_at)
    return Ending(
        name=name, status=status, time=began, lines=words.lines, complaint=words.complaint
    )


def is_settled(failed: Sequence[Ending], num_running: int, since_seconds: float) -> bool:
    """Return whether it is time to name the cause, `since_seconds` after the first failure."""
    if num_running == 0:
        return True
    patience = ECHO_SECONDS if all(one.is_echo for one in failed) else SETTLE_SECONDS
    return since_seconds >= patience


def first_cause(failed: Iterable[Ending], well: Mapping[str, float]) -> MemberError:
    """The error that names who failed first, of itself.

    `well` are those that ended well, with their time: a member that lost one of them is no cause,
    but there is no other to name. Where signals ended several, any may be the one that was needed:
    all are named.
    """
    failed = list(failed)
    # Of those that failed in one moment, a signal from outside is no answer to anything.
    cause = min(
        failed,
        key=lambda one: (one.is_echo, not one.names_missing, one.time, one.status >= 0),
    )
    killed = [one for one in failed if one.status < 0 and not one.is_echo]
    beside = {one.name: one.status for one in killed if cause in killed and one is not cause}
    left = [name for name, time in well.items() if time < cause.time + LEAVE_SECONDS]
    return MemberError(
        cause.name,
        cause.status,
        cause.lines,
        sentence=sentence(cause.complaint),
        without=", ".join(left) if cause.is_echo else "",
        beside=beside,
    )


def sentence(complaint: Sequence[str]) -> str:
    """Return the message of a PacelineError, if that is how the member ended; otherwise ""."""
    for place, line in enumerate(complaint):
        kind, _, rest = line.partition(": ")
        if kind == "error" or kind.startswith("paceline.errors."):
            more = takewhile(lambda text: text.startswith(" "), complaint[place + 1 :])
            return "\n".join([rest, *more])
    return ""
