"""Following a run while it goes: its steps as they are written, its summary when it ends."""

import os
import time
from collections.abc import Callable

from paceline.errors import MemberError
from paceline.record.entries import Event
from paceline.record.folder import RunFolder
from paceline.record.summary import summarise

Progress = Callable[[int], None]
"""Called with the number of steps that are done."""


class recorded:  # noqa: N801 - reads as a word in a with statement
    """Leaves the summary of what happened, however the block ends."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if isinstance(error, MemberError):
            text = str(error).partition(";")[0]
            now = time.monotonic() / self._folder.experiment().cluster.dilation
            lost = Event(time_seconds=now, member=error.member, kind="lost", text=text)
            self._folder.add_event(lost)
        summarise(self._folder, "finished" if kind is None else "failed")


class StepCounter:
    """Counts a worker's steps from its file as it grows, and reports each change."""

    def __init__(self, folder: RunFolder, progress: Progress, member: str = "worker0") -> None:
        self._path = folder.path / "members" / f"{member}.steps.jsonl"
        self._progress, self._offset, self._steps = progress, 0, 0

    def __call__(self) -> None:
        if not self._path.exists() or os.path.getsize(self._path) == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        self._steps += new.count(b"\n")
        self._progress(self._steps)
