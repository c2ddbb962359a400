"""Following a run while it goes: its steps as they are written, its summary when it ends."""

import contextlib
import os
import time
from collections.abc import Callable

import msgspec

from paceline.errors import Interrupted, MemberError, RecordError
from paceline.record.entries import RecordedEvent, Step
from paceline.record.folder import RunFolder
from paceline.record.script import warning
from paceline.record.summary import summarise

ASKED = (KeyboardInterrupt, SystemExit, BrokenPipeError)
"""Exceptions by which a user ends a run."""

Progress = Callable[[int], None]
"""Called with the number of steps that are done."""


class recorded:  # noqa: N801 - reads as a word in a with statement
    """Leaves the summary of what happened, however the block ends."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if error is None:
            self._warn()
            summarise(self._folder, "finished", (self._began, self._now()))
            return
        if isinstance(error, Interrupted):
            error.kept = str(self._folder.path)
        # What could not be written any more must not hide why.
        with contextlib.suppress(RecordError):
            self._note(error)
            self._end_members(error)
        state = "interrupted" if isinstance(error, ASKED) else "failed"
        with contextlib.suppress(RecordError):
            summarise(self._folder, state, (self._began, self._now()))

    def _warn(self) -> None:
        members = self._folder.members()
        there = [member for member in members if member.status != "lost"]
        names = [member.name for member in there if member.role == "worker"]
        found = {name: self._folder.steps(name) for name in names}
        # Not how many each took: one may have joined later.
        steps = {name: own[-1].step + 1 if own else 0 for name, own in found.items()}
        text = warning(self._folder.experiment(), members, steps)
        if text:
            self._add("launcher", "warning", text)

    def _note(self, error: BaseException) -> None:
        if isinstance(error, MemberError):
            self._add(error.member, "lost", _with_last_words(error))
        elif isinstance(error, Interrupted):
            self._add("launcher", "interrupted", error.brief)
        elif isinstance(error, BrokenPipeError):
            self._add("launcher", "interrupted", "ended because nobody read its output any more")
        else:
            self._add("launcher", "failed", str(error))

    def _end_members(self, error: BaseException) -> None:
        """Mark the members that could not write that they no longer run."""
        for member in self._folder.members():
            if member.status == "running":
                is_cause = isinstance(error, MemberError) and error.member == member.name
                member.status = "failed" if is_cause else "ended"
                self._folder.write_member(member)

    def _add(self, member: str, kind: str, text: str) -> None:
        event = RecordedEvent(time_seconds=self._now(), member=member, kind=kind, text=text)
        self._folder.add_event(event)

    def _now(self) -> float:
        """Return the time on the clock of the members' records: the tunnel's is slowed."""
        experiment = self._folder.experiment()
        dilation = experiment.cluster.dilation if experiment.engine == "tunnel" else 1.0
        return time.monotonic() / dilation


class StepCounter:
    """Follows a worker's steps in its file as it grows, and reports how many are done.

    A run that went on from a checkpoint begins with the steps that were done before it.
    """

    def __init__(self, folder: RunFolder, progress: Progress, member: str = "worker0") -> None:
        self._path = folder.path / "members" / f"{member}.steps.jsonl"
        self._progress, self._offset, self._partial = progress, 0, b""
        self.last: Step | None = None
        """The newest that was written."""

    def __call__(self) -> None:
        if not self._path.exists() or os.path.getsize(self._path) == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        *lines, self._partial = (self._partial + new).split(b"\n")
        if lines:
            self.last = msgspec.json.decode(lines[-1], type=Step)
            self._progress(self.last.step + 1)


def _with_last_words(error: MemberError) -> str:
    """Return how a member ended and the last line it printed: an explanation starts with it."""
    if error.is_sentence:
        return str(error).splitlines()[0]
    said = next((line.strip() for line in reversed(error.last_lines) if line.strip()), "")
    return f"{error.brief}: {said}" if said else error.brief
