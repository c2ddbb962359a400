"""A run folder from what other tools left behind: Kineto traces, and flight-recorder dumps."""

import json
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import RecordError
from paceline.observe import place
from paceline.observe.finish import finish
from paceline.observe.hangs import diagnose, standing_of
from paceline.observe.kineto import Trace, read_trace
from paceline.observe.ring import plain_pickle
from paceline.observe.traces import steps_of
from paceline.record import MemberRecord, RecordedEvent, RunFolder, free_path
from paceline.record.entries import OBSERVED

RUN = "paceline-run"
"""Where the imported run goes, beside its traces."""

TRACES = ("*.pt.trace.json", "*.pt.trace.json.gz")
MOST_DUMP_BYTES = 1 << 30
PICKLE = b"\x80"

Dump = tuple[int, dict[str, Any]]
"""A rank, and what its flight recorder held."""


def holds_traces(path: Path) -> bool:
    """Whether something in the folder can be imported."""
    return bool(_traces(path) or _dump_files(path))


def import_folder(path: Path) -> RunFolder:
    """The run that the traces or dumps of a folder tell of; made once, and again when they change.

    RecordError in one sentence where a file is damaged or nothing can be read.
    """
    traces, dumps = _traces(path), _dump_files(path)
    newest = max(file.stat().st_mtime for file in (*traces, *dumps))
    target = path / RUN
    done = target / "run.json"
    if done.is_file() and done.stat().st_mtime > newest:
        return RunFolder(target)
    try:
        target = free_path(target)
        target.mkdir()
        target.rmdir()
    except OSError:  # a disk that is only read
        target = Path(tempfile.mkdtemp(prefix="paceline-")) / RUN
    if traces:
        return _from_traces(path, target, [read_trace(file) for file in traces])
    return _from_dumps(path, target, [read_dump(file) for file in dumps])


def _traces(path: Path) -> list[Path]:
    return sorted(file for pattern in TRACES for file in path.glob(pattern))


def _dump_files(path: Path) -> list[Path]:
    """Files that hold a flight recorder's dump, by how they begin."""
    found = []
    for file in sorted(path.iterdir()) if path.is_dir() else []:
        if not file.is_file() or file.name.startswith(".") or file in _traces(path):
            continue
        with file.open("rb") as opened:
            head = opened.read(4096)
        if (
            head[:1] == PICKLE
            or (head.lstrip()[:1] == b"{" and b'"entries"' in head)
            or (head.lstrip()[:1] == b"{" and b'"pg_config"' in head)
        ):
            found.append(file)
    return found


def read_dump(path: Path) -> Dump:
    """A flight recorder's dump, JSON or pickle; a pickle may hold plain data and nothing else."""
    try:
        if path.stat().st_size > MOST_DUMP_BYTES:
            raise RecordError(f"{path} is larger than any flight recorder's dump.")
        content = path.read_bytes()
        found = plain_pickle(content) if content[:1] == PICKLE else json.loads(content)
    except (pickle.UnpicklingError, EOFError, IndexError, KeyError, AttributeError) as error:
        raise RecordError(f"{path} is refused: {error}.") from error
    except (ValueError, RecursionError, OSError, MemoryError, OverflowError, TypeError) as error:
        raise RecordError(f"{path} is damaged: {error}.") from error
    if not isinstance(found, dict) or not isinstance(found.get("entries", []), list):
        raise RecordError(f"{path} is not a flight recorder's dump: it has no entries.")
    digits = "".join(c if c.isdigit() else " " for c in path.name).split()
    return int(digits[-1]) if digits else 0, found


def _new_run(path: Path, target: Path, ranks: int) -> RunFolder:
    folder = place.create(target, path.resolve().name, ranks)
    folder.write("machine.json", b"{}")  # where the job ran is not in the files
    return folder


def _from_traces(path: Path, target: Path, traces: Sequence[Trace]) -> RunFolder:
    ranks = max(max(trace.ranks for trace in traces), len(traces))
    seen = {trace.rank for trace in traces}
    if len(seen) < len(traces):  # traces of processes that knew no ranks
        for number, trace in enumerate(traces):
            trace.rank = number
    folder = _new_run(path, target, ranks)
    for trace in traces:
        name = f"rank{trace.rank}"
        steps, calls = steps_of(trace)
        if not steps:
            raise RecordError(
                f"{trace.path} has no steps: call the profiler's step() in the loop, or record "
                "at least two optimizer steps."
            )
        folder.write_steps(name, steps)
        folder.write_collectives(name, calls)
        kind = "ddp" if trace.forward else "collectives"
        observed = {
            "architecture": kind if ranks > 1 else "single",
            "collectives": len(calls),
            "samples": "unknown",
            "clock": trace.host or trace.path.name,
        }
        folder.write_member(
            MemberRecord(
                name=name,
                role="worker",
                host=trace.host or "unknown",
                status="finished",
                counters={"observed": observed},
            )
        )
    missing = sorted(set(range(ranks)) - {trace.rank for trace in traces})
    text = "imported from traces: samples are not in them, so each step counts as one sample"
    if missing:
        text += f"; there is no trace of {', '.join(f'rank{rank}' for rank in missing)}"
    folder.add_event(RecordedEvent(time_seconds=0.0, member="rank0", kind="note", text=text))
    finish(folder)
    return folder


def _from_dumps(path: Path, target: Path, dumps: Sequence[Dump]) -> RunFolder:
    try:
        standing = [standing_of(rank, dump) for rank, dump in dumps]
        known = [rank for one in standing for ranks in one.group_ranks.values() for rank in ranks]
        ranks = max([*known, *(rank for rank, _ in dumps)]) + 1
        found = diagnose(standing, ranks)
    except (TypeError, ValueError, KeyError, AttributeError, msgspec.MsgspecError) as error:
        raise RecordError(f"{path} holds dumps in an unknown form: {error}.") from error
    folder = _new_run(path, target, ranks)
    text = " ".join(found).rstrip(".") or "no rank waits in a collective in these dumps"
    for rank, _ in dumps:
        folder.write_member(
            MemberRecord(name=f"rank{rank}", role="worker", host="unknown", status="failed")
        )
    folder.add_event(RecordedEvent(time_seconds=0.0, member="rank0", kind="failed", text=text))
    summary = folder.summary()
    summary.status, summary.engine = "failed", OBSERVED
    summary.members = folder.members()
    folder.write_summary(summary)
    return folder
