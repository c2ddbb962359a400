"""Says that a job stands still, who waits for whom, and where each rank is, while it still hangs.

Each rank that makes no progress leaves a note in the run folder; the first of them reads all notes
and says what they come to. Nothing of the job is ended for it.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import msgspec
import psutil

from paceline.observe import ring
from paceline.observe.hangs import Standing, diagnose, script_line, standing_of
from paceline.record import MemberRecord, RecordedEvent, RunFolder

SECONDS = "PACELINE_OBSERVE_STALL"
"""The environment variable that says after how many seconds without progress a job stands still."""

LEAST_SECONDS = 20.0
USUAL_GAPS = 8.0
"""Still: so many times as long as it ever took between two signs of progress, and no less."""

STALL = "stall"


class Watchdog:
    """Of one rank; asked about once a second by the thread that reads the ring."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self._path = folder.path / "members" / f"{name}.standing"
        self._thread = threading.main_thread().ident
        self._least = float(os.environ.get(SECONDS, LEAST_SECONDS))
        self._seen: object = None
        self._since = time.monotonic()
        self._longest = 0.0
        self._has_noted = self._has_said = False

    def look(self, steps: int, dump: Mapping[str, Any] | None) -> None:
        """Note progress, or that there was none for too long."""
        now = time.monotonic()
        seen = (steps, _progress(dump))
        if seen != self._seen:
            if steps > 1:  # the first steps build graphs and buffers
                self._longest = max(self._longest, now - self._since)
            self._seen, self._since = seen, now
            self._clear()
            return
        if now - self._since < max(self._least, USUAL_GAPS * self._longest) or not self._waits(
            dump
        ):
            return
        if not self._has_noted:
            self._note(steps)
        elif not self._has_said:
            self._say(now - self._since)

    def _waits(self, dump: Mapping[str, Any] | None) -> bool:
        """This rank has called collectives; one that never did may be at any long work."""
        return bool((dump or {}).get("entries"))

    def _note(self, steps: int) -> None:
        dump = ring.read(stacks=True) or {}
        rank = int(self._name.removeprefix("rank"))
        standing = standing_of(rank, dump)
        standing.steps, standing.line = steps, line_of(self._thread)
        self._path.write_bytes(msgspec.json.encode(standing))
        self._has_noted = True

    def _clear(self) -> None:
        if self._has_noted:
            self._path.unlink(missing_ok=True)
            self._has_noted = self._has_said = False

    def _say(self, still_seconds: float) -> None:
        """The first rank among those that stand still speaks for all."""
        notes = read_notes(self._folder)
        known = {one.rank for one in notes}
        self._has_said = True
        if not notes or f"rank{min(known)}" != self._name:
            return
        members = self._folder.members()
        for member in members:
            rank = int(member.name.removeprefix("rank"))
            if rank not in known:
                notes.append(Standing(rank=rank, ended=_ending(member)))
        found = diagnose(notes, self._folder.experiment().cluster.workers)
        if not found:
            return
        text = f"no progress for {still_seconds:.0f} s: {' '.join(found)}"
        print(f"paceline observe: {text}", file=sys.stderr, flush=True)
        self._folder.add_event(
            RecordedEvent(time_seconds=time.monotonic(), member=self._name, kind=STALL, text=text)
        )


def read_notes(folder: RunFolder) -> list[Standing]:
    """What the ranks that stand still wrote, in order of rank."""
    found = []
    for path in (folder.path / "members").glob("*.standing"):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Standing))
        except (OSError, msgspec.MsgspecError):  # it made progress meanwhile, or still writes
            continue
    return sorted(found, key=lambda one: one.rank)


def line_of(thread: int | None) -> str:
    """The line of the script at which a thread of this process is."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return script_line(frames)


def _ending(member: MemberRecord) -> str:
    if member.status != "running":
        return member.status
    alive = member.pid is None or psutil.pid_exists(member.pid)
    return "" if alive else "its process is gone"


def _progress(dump: Mapping[str, Any] | None) -> object:
    entries = (dump or {}).get("entries") or []
    last = max((int(entry["record_id"]) for entry in entries), default=-1)
    done = sum(bool(entry.get("retired")) for entry in entries)
    return last, done
