"""A run folder: the answer to an experiment, written as the run goes.

    experiment.toml            the question
    machine.json               where it ran
    events.jsonl               what was worth a line
    members/worker0.json       what the member was and did (written at its start and at its end)
    members/worker0.steps.jsonl    one line per step
    members/worker0.series.jsonl   one line per second
    members/rank0.collectives.jsonl    one line per collective call of an observed job
    launcher.json              the process that writes the summary
    logs/worker0.log           what the member printed, in the order it came
    run.json                   the summary; status "running" until the end

Each member writes its own files and no other, so a killed run leaves a readable record.
"""

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline import spec
from paceline.errors import RecordError
from paceline.record.entries import (
    CollectiveCall,
    MemberRecord,
    RecordedEvent,
    Sample,
    Step,
    Summary,
)
from paceline.record.liveness import Launcher, is_gone, this_process
from paceline.record.lives import RESTART, joined
from paceline.record.machine import describe

FORMAT_VERSION = 2
"""1: a script's run had a model, data and a batch that the user had not named."""

FULL = (errno.ENOSPC, errno.EDQUOT)

E = TypeVar("E")


class RunFolder:
    """Paths, writing and reading of one run's files. Nothing is kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, experiment: spec.Experiment) -> "RunFolder":
        """Create the folder with the question and the machine in it."""
        folder = cls(path)
        try:
            (path / "members").mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            raise
        except OSError as error:
            raise cannot_write(path, error) from error
        folder.write("launcher.json", msgspec.json.encode(this_process()))
        folder.write("experiment.toml", spec.to_toml(experiment).encode())
        folder.write("machine.json", msgspec.json.format(msgspec.json.encode(describe())))
        folder.write_summary(empty_summary(experiment, "running"))
        return folder

    def write(self, name: str, content: bytes) -> None:
        """Replace one file at once: a reader sees the old or the new content, never a part."""
        target = self.path / name
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            partial.write_bytes(content)
            partial.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise cannot_write(target, error) from error

    def write_summary(self, summary: Summary) -> None:
        content = msgspec.json.format(msgspec.json.encode(summary), indent=1)
        try:
            self.write("run.json", content)
        except RecordError:
            self._write_in_place(summary)
            raise

    def _write_in_place(self, summary: Summary) -> None:
        """Write a short summary, which fits where the first one is: a full disk must not hide how
        the run ended."""
        short = msgspec.structs.replace(summary, members=[], notes=None, verdict=None)
        with contextlib.suppress(OSError), (self.path / "run.json").open("r+b") as file:
            file.write(msgspec.json.encode(short))
            file.truncate()

    def write_member(self, member: MemberRecord) -> None:
        content = msgspec.json.format(msgspec.json.encode(member), indent=1)
        self.write(f"members/{member.name}.json", content)

    def write_steps(self, member: str, steps: Sequence[Step]) -> None:
        """All steps of a member at once; a member that runs writes its own line by line."""
        self._write_lines(f"members/{member}.steps.jsonl", steps)

    def write_series(self, member: str, samples: Sequence[Sample]) -> None:
        """All samples of a member at once."""
        self._write_lines(f"members/{member}.series.jsonl", samples)

    def _write_lines(self, name: str, entries: Sequence[Step | Sample | CollectiveCall]) -> None:
        self.write(name, b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))

    def add_event(self, event: RecordedEvent) -> None:
        path = self.path / "events.jsonl"
        try:
            with path.open("ab") as file:
                file.write(msgspec.json.encode(event) + b"\n")
        except OSError as error:
            raise cannot_write(path, error) from error

    def experiment(self) -> spec.Experiment:
        return spec.load(self.path / "experiment.toml", recorded=True)

    def summary(self) -> Summary:
        """The summary as far as it is known; a run whose launcher is gone no longer runs."""
        found = _decode(self.path / "run.json", Summary)
        if found.status == "running" and self.launcher_is_gone:
            found = _decode(self.path / "run.json", Summary)  # its last act may be to write it
            if found.status == "running":
                failed = any(member.status == "failed" for member in self.members())
                found.status = "failed" if failed else "killed"
        return found

    @property
    def launcher_is_gone(self) -> bool:
        """It has certainly ended, well or not."""
        path = self.path / "launcher.json"
        return path.is_file() and is_gone(_decode(path, Launcher))

    def machine(self) -> dict[str, object]:
        return _decode(self.path / "machine.json", dict[str, object])

    def members(self) -> list[MemberRecord]:
        """Every member that got as far as writing its file, workers first, in order of number."""
        files = (self.path / "members").glob("*.json")
        members = [_decode(file, MemberRecord) for file in files if not file.name.startswith(".")]
        return sorted(members, key=lambda member: (member.role != "worker", _number(member.name)))

    def wait_for_members(self, deadline_seconds: float = 10.0) -> None:
        """Give members that are about to end the time to write their last lines."""
        until = time.monotonic() + deadline_seconds
        while any(m.status == "running" for m in self.members()) and time.monotonic() < until:
            time.sleep(0.05)

    def steps(self, member: str) -> list[Step]:
        """The steps that count: one that was done again after a restart counts once."""
        return joined(self.all_steps(member), self.restarts())

    def all_steps(self, member: str) -> list[Step]:
        """Return all steps, also those that were undone."""
        return list(_lines(self.path / "members" / f"{member}.steps.jsonl", Step))

    def restarts(self) -> list[float]:
        """Return when all members were started again."""
        return [event.time_seconds for event in self.events() if event.kind == RESTART]

    def series(self, member: str) -> list[Sample]:
        return list(_lines(self.path / "members" / f"{member}.series.jsonl", Sample))

    def collectives(self, member: str) -> list[CollectiveCall]:
        """The collective calls of a member of an observed job, in its order."""
        return list(_lines(self.path / "members" / f"{member}.collectives.jsonl", CollectiveCall))

    def write_collectives(self, member: str, entries: Sequence[CollectiveCall]) -> None:
        """All collective calls of a member at once."""
        self._write_lines(f"members/{member}.collectives.jsonl", entries)

    def events(self) -> list[RecordedEvent]:
        return list(_lines(self.path / "events.jsonl", RecordedEvent))


def free_path(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, … that does not exist yet."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def open_folder(path: Path) -> RunFolder:
    """The run folder at `path`, of this or an older format; RecordError when it is none."""
    if not (path / "run.json").is_file():
        raise RecordError(f"{path} is not a run folder: it has no run.json")
    raw = _decode(path / "run.json", dict[str, object])
    version = raw.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        known = f"this Paceline reads up to {FORMAT_VERSION}"
        raise RecordError(f"{path} has format version {version}; {known}: upgrade Paceline")
    return RunFolder(path)


def empty_summary(experiment: spec.Experiment, status: str) -> Summary:
    """The part of a summary that the experiment alone decides."""
    cluster, workload = experiment.cluster, experiment.workload
    summary = Summary(
        format_version=FORMAT_VERSION,
        status=status,
        name=experiment.name,
        engine=experiment.engine,
        architecture=spec.format_architecture(experiment.architecture),
        workers=cluster.workers,
        servers=experiment.num_servers,
        members=[],
    )
    if workload.script is not None:
        summary.script = str(workload.script)
        return summary
    summary.model, summary.data = workload.model, workload.data
    summary.global_batch = workload.global_batch_for(cluster.workers)
    return summary


def cannot_write(path: Path, error: OSError) -> RecordError:
    """The error for a part of the record that could not be written."""
    fix = "\n  fix: make room, or name a folder on another disk with --out."
    return RecordError(
        f"{path} cannot be written: {error.strerror}.{fix if error.errno in FULL else ''}"
    )


def _lines(path: Path, kind: type[E]) -> Iterator[E]:
    """Entries of a JSON-lines file; a last line cut short by a kill is left out."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield decoder.decode(line)


def _decode(path: Path, kind: type[E]) -> E:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error


def _number(name: str) -> int:
    match = re.search(r"\d+$", name)
    return int(match[0]) if match else 0
