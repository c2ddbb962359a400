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
        self._began = self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        now = self._now()
        if isinstance(error, MemberError):
            text = str(error).partition(";")[0]
            said = next((line.strip() for line in reversed(error.last_lines) if line.strip()), "")
            text += f": {said}" if said else ""
            lost = Event(time_seconds=now, member=error.member, kind="lost", text=text)
            self._folder.add_event(lost)
        elif error is not None:
            text = "it was interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            failed = Event(time_seconds=now, member="launcher", kind="failed", text=text)
            self._folder.add_event(failed)
        summarise(self._folder, "finished" if kind is None else "failed", (self._began, now))

    def _now(self) -> float:
        """On the clock of the members' records: the tunnel's is slowed."""
        experiment = self._folder.experiment()
        dilation = experiment.cluster.dilation if experiment.engine == "tunnel" else 1.0
        return time.monotonic() / dilation


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
