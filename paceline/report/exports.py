"""A run for other people's tools: Perfetto and Holistic Trace Analysis, TensorBoard, MLPerf's log.

One table; each export is a function `(run, folder) -> files written`.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline import record, spec
from paceline.errors import MissingError, SpecError, suggest
from paceline.record import PHASES, MemberRecord, RunFolder, Step
from paceline.report.rows import from_runs
from paceline.report.write import write_csv

Event = dict[str, Any]


def export(kind: str, run: RunFolder, folder: Path) -> list[Path]:
    """Write `run` as `kind` into `folder`; returns the files."""
    if kind not in EXPORTS:
        raise SpecError("--export", f'"{kind}" is not an export.', suggest(kind, EXPORTS))
    folder.mkdir(parents=True, exist_ok=True)
    return EXPORTS[kind](run, folder)


def trace(run: RunFolder, folder: Path) -> list[Path]:
    """Chrome traces of all members on worker 0's clock: `trace.json`, and one file per worker.

    The record keeps how long each phase of a step took, not every switch between them, so a step's
    phases are drawn one after the other in the order a step meets them. Compute is marked as a
    device's kernels: Holistic Trace Analysis then finds the time the device is idle.
    """
    members, summary = run.members(), run.summary()
    start = _start_seconds(run, members)
    ranks = folder / "ranks"
    ranks.mkdir(exist_ok=True)
    together: list[Event] = []
    files = []
    for number, member in enumerate(members):
        events = list(_member_events(run, member, number, start))
        together += events
        if member.role == "worker":
            about = {"backend": summary.architecture, "rank": number, "world_size": summary.workers}
            content = {"schemaVersion": 1, "distributedInfo": about, "traceEvents": events}
            files.append(ranks / f"{member.name}.json")
            # Holistic Trace Analysis looks for "rank": with a space behind it, line by line.
            files[-1].write_text(json.dumps(content), encoding="utf-8")
    offsets = {member.name: member.clock_offset_seconds or 0.0 for member in members}
    together += [
        {
            "ph": "i",
            "s": "g",
            "name": event.text,
            "pid": 0,
            "tid": 0,
            "ts": _microseconds(event.time_seconds + offsets.get(event.member, 0.0) - start),
        }
        for event in run.events()
    ]
    whole = folder / "trace.json"
    whole.write_bytes(msgspec.json.encode({"schemaVersion": 1, "traceEvents": together}))
    return [whole, *files]


def tensorboard(run: RunFolder, folder: Path) -> list[Path]:
    """Loss, throughput and phases against step; CPU and bytes of members against seconds."""
    try:
        from tensorboard.summary import Writer
    except ImportError:
        fix = "pip install 'paceline[tensorboard]'"
        raise MissingError("TensorBoard is not installed.", fix) from None
    members = run.members()
    steps = {m.name: own for m in members if m.role == "worker" and (own := run.steps(m.name))}
    target = folder / run.path.resolve().name
    writer = Writer(str(target))
    for step, loss in record.losses(steps, record.gone(run)).items():
        writer.add_scalar("loss", loss, step)
    for name, own in steps.items():
        for entry in own:
            seconds = entry.end_seconds - entry.start_seconds
            writer.add_scalar(f"samples_per_second/{name}", entry.samples / seconds, entry.step)
            for phase, part in entry.breakdown_seconds.items():
                writer.add_scalar(f"{phase}_seconds/{name}", part, entry.step)
    start = _start_seconds(run, members)
    for member in members:
        for sample in run.series(member.name):
            second = round(sample.time_seconds + (member.clock_offset_seconds or 0.0) - start)
            for key, value in msgspec.to_builtins(sample).items():
                if key != "time_seconds":
                    writer.add_scalar(f"{key}/{member.name}", float(value), second)
    writer.close()
    return sorted(target.iterdir())


def mllog(run: RunFolder, folder: Path) -> list[Path]:
    """MLPerf's `:::MLLOG` lines. Moments are the run's own, set on the wall clock by its files."""
    file = folder / f"{run.path.resolve().name}.mllog"
    lines = [b":::MLLOG " + msgspec.json.encode(line) + b"\n" for line in _mllog_lines(run)]
    file.write_bytes(b"".join(lines))
    return [file]


def csv(run: RunFolder, folder: Path) -> list[Path]:
    """The figures, steps and samples as tables."""
    write_csv(from_runs([run]), folder)
    return [folder / name for name in ("table.csv", "steps.csv", "series.csv")]


EXPORTS: dict[str, Callable[[RunFolder, Path], list[Path]]] = {
    "trace": trace,
    "tensorboard": tensorboard,
    "mllog": mllog,
    "csv": csv,
}


def _member_events(run: RunFolder, member: MemberRecord, pid: int, start: float) -> Iterator[Event]:
    offset = (member.clock_offset_seconds or 0.0) - start
    about = {"name": f"{member.name} on {member.host}"}
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": about}
    order = {"sort_index": pid}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": order}
    for entry in run.steps(member.name):
        yield from _step_events(entry, pid, offset)
    for sample in run.series(member.name):
        moment = _microseconds(sample.time_seconds + offset)
        for key, value in msgspec.to_builtins(sample).items():
            if key != "time_seconds":
                yield {"ph": "C", "name": key, "pid": pid, "ts": moment, "args": {key: value}}


def _step_events(entry: Step, pid: int, offset: float) -> Iterator[Event]:
    def span(name: str, kind: str, begin: float, seconds: float, tid: int) -> Event:
        times = {"ts": _microseconds(begin + offset), "dur": _microseconds(seconds)}
        arguments = {"step": entry.step} | ({"stream": tid} if kind == "kernel" else {})
        event = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "args": arguments}
        return {**event, **times}

    whole = entry.end_seconds - entry.start_seconds
    yield span(f"ProfilerStep#{entry.step}", "user_annotation", entry.start_seconds, whole, 1)
    begin = entry.start_seconds
    for phase in PHASES:
        seconds = entry.breakdown_seconds.get(phase, 0.0)
        if seconds > 0:
            computes = phase in ("forward", "backward", "update")
            yield span(phase, "kernel" if computes else "cpu_op", begin, seconds, 2)
            begin += seconds
    if entry.ready_seconds is not None:
        event = {"ph": "i", "s": "t", "name": "gradients ready", "pid": pid, "tid": 2}
        yield {**event, "ts": _microseconds(entry.ready_seconds + offset)}


def _microseconds(seconds: float) -> float:
    """What traces count in, to a tenth of a nanosecond; never before the start."""
    return max(0.0, round(seconds * 1e6, 4))


def _start_seconds(run: RunFolder, members: list[MemberRecord]) -> float:
    """The first moment of the record, on worker 0's clock."""
    moments = []
    for member in members:
        offset = member.clock_offset_seconds or 0.0
        moments += [step.start_seconds + offset for step in run.steps(member.name)[:1]]
        moments += [sample.time_seconds + offset for sample in run.series(member.name)[:1]]
    return min(moments, default=0.0)


def _mllog_lines(run: RunFolder) -> Iterator[Event]:
    experiment, summary, members = run.experiment(), run.summary(), run.members()
    workers = [m.name for m in members if m.role == "worker"]
    steps = {name: own for name in workers if (own := run.steps(name))}
    if not steps:
        return
    first = next(iter(steps.values()))
    written = (run.path / "members" / f"{next(iter(steps))}.steps.jsonl").stat().st_mtime
    wall = written - first[-1].end_seconds  # the last step is written within a second of its end

    def line(
        key: str, value: Any, seconds: float, kind: str = "POINT_IN_TIME", **more: Any
    ) -> Event:
        when = round((seconds + wall) * 1000)
        event = {"namespace": "paceline", "time_ms": when, "event_type": kind, "key": key}
        return {**event, "value": value, "metadata": more}

    begin, end = first[0].start_seconds, first[-1].end_seconds
    for key, value in {
        "submission_benchmark": summary.subject,
        "submission_platform": f"{summary.workers} workers, {summary.servers} servers",
        **_asked(experiment),
        "architecture": spec.format_architecture(experiment.architecture),
    }.items():
        yield line(key, value, begin)
    yield line("run_start", None, begin, "INTERVAL_START")
    ends = {entry.step: entry.end_seconds for entry in first}
    for step, loss in record.losses(steps, record.gone(run)).items():
        if step in ends:
            batch = summary.global_batch
            seen: Event = {"samples_count": (step + 1) * batch} if isinstance(batch, int) else {}
            yield line("train_loss", loss, ends[step], **seen, step_num=step)
    if summary.samples_per_second is not None:
        yield line("throughput", summary.samples_per_second, end)
    if summary.accuracy is not None:
        yield line("eval_accuracy", summary.accuracy.get("top1"), end)
    status = "success" if summary.status == "finished" else "aborted"
    yield line("run_stop", None, end, "INTERVAL_END", status=status)


def _asked(experiment: spec.Experiment) -> dict[str, Any]:
    """Batch, seed and optimizer as the experiment names them; a script's are its own."""
    workload = experiment.workload
    if workload.script is not None:
        return {}
    return {
        "global_batch_size": workload.global_batch_for(experiment.cluster.workers),
        "seed": workload.seed,
        "opt_name": workload.optimizer.name,
        "opt_base_learning_rate": workload.optimizer.learning_rate,
    }
