"""Run folders written by hand, with the cause of their slowness planted. No process is started."""

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from paceline import record, spec
from paceline.explain.findings import Explanation
from paceline.record import MemberRecord, RecordedEvent, RunFolder, Sample, Step

MB = 1_000_000
START = 1000.0


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one worker's own phases."""

    input: float = 0.001
    forward: float = 0.010
    backward: float = 0.018
    update: float = 0.001
    overhead: float = 0.001

    @property
    def until_ready(self) -> float:
        return self.overhead + self.input + self.forward + self.backward


USUAL = Times()


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What every sample of a member says of its machine."""

    cpu_fraction: float = 0.95
    cpu_wait_fraction: float | None = None
    machine_cpu_fraction: float | None = None
    available_bytes: int | None = None
    children_cpu_fraction: float | None = None


USUAL_MACHINE = Machine()


def synchronous_run(
    path: Path,
    *,
    workers: int = 2,
    servers: int = 0,
    architecture: str = "ring",
    times: Times = USUAL,
    slow: Mapping[str, Times] | None = None,
    exchange_seconds: float = 0.002,
    exchange_bytes: float = 4 * MB,
    server_cpu_fraction: float = 0.2,
    link: str = "",
    batch: int = 32,
    steps: int = 40,
    clock_offsets: Mapping[str, float] | None = None,
    jitter: float = 0.01,
    seed: int = 0,
    status: str = "finished",
    fields: Mapping[str, object] | None = None,
    losses: Callable[[int], float] = lambda step: 2.3 / (1 + 0.05 * step),
    pause: Callable[[str, int], float] = lambda worker, step: 0.0,
    pause_name: str = "checkpoint",
    outside: Callable[[int], float] = lambda step: 0.0,
    slow_steps: Callable[[int], float] = lambda step: 1.0,
    first_steps_seconds: float = 0.0,
    cores: int = 64,
    machine: Machine = USUAL_MACHINE,
    counters: Mapping[str, Mapping[str, object]] | None = None,
    results: Mapping[str, float] | None = None,
    event: str = "",
    script: str = "",
) -> RunFolder:
    """A run in which every step ends for all when the last worker is ready, plus the exchange.

    A worker sends and receives `exchange_bytes` per step; servers share what all workers send.
    `fields` are further ones of the experiment; `pause` are seconds before a worker's step that
    its clock named, `outside` such that only show in the times of worker 0; `slow_steps`
    multiplies worker 0's own time.
    """
    cluster = spec.Cluster(workers=workers, servers=servers, link=link)
    workload = spec.Workload(batch=batch, steps=steps)
    if script:  # whose model, data and batch nobody else knows
        workload = spec.Workload(script=spec.Script(path=script))
    experiment = spec.Experiment(
        name=path.name,
        workload=workload,
        architecture=spec.parse_architecture(architecture),
        cluster=cluster,
        engine="tunnel" if link else "here",
    )
    experiment = spec.replace(experiment, **(fields or {}))
    folder = RunFolder.create(path, experiment)
    described = {"cores": cores, "memory_bytes": 64_000 * MB}
    (path / "machine.json").write_bytes(msgspec.json.encode(described))
    names = [f"worker{rank}" for rank in range(workers)]
    offsets = dict(clock_offsets or {})
    generator = random.Random(seed)
    now, entries = START, {name: [] for name in names}
    for step in range(steps):
        ready, starts = {}, {}
        for name in names:
            own = (slow or {}).get(name, times)
            first = name == names[0]
            starts[name] = now + pause(name, step) + (outside(step) if first else 0.0)
            own_seconds = own.until_ready * (slow_steps(step) if first else 1.0)
            own_seconds += first_steps_seconds if step == 0 else 0.0
            ready[name] = starts[name] + own_seconds * (1 + jitter * generator.random())
        exchanged = max(ready.values()) + (exchange_seconds if workers + servers > 1 else 0.0)
        now = exchanged + times.update
        for name in names:
            own = (slow or {}).get(name, times)
            scale = (ready[name] - starts[name]) / own.until_ready
            entry = _step(step, own, scale, ready[name], exchanged, now, batch)
            entry.start_seconds -= outside(step) if name == names[0] else 0.0
            entry.loss = losses(step)
            entry.not_finite = not math.isfinite(entry.loss)
            if pause(name, step):
                entry.paused_seconds = {pause_name: pause(name, step)}
            entries[name].append(_shifted(entry, -offsets.get(name, 0.0)))
    for name in names:
        _write_lines(folder, f"{name}.steps.jsonl", entries[name])
        series = _series(now, exchange_bytes * steps, machine)
        series = [_shifted_sample(sample, -offsets.get(name, 0.0)) for sample in series]
        own = MemberRecord(name=name, role="worker", host=f"host-{name}", status=status)
        own.clock_offset_seconds = offsets.get(name)
        own.counters = dict((counters or {}).get(name, {}))
        own.results = dict(results or {}) if name == names[0] else {}
        _write_member(folder, own, series)
    serving = msgspec.structs.replace(machine, cpu_fraction=server_cpu_fraction)
    for rank in range(servers):
        total = workers * exchange_bytes * steps / servers
        name = f"server{rank}"
        own = MemberRecord(name=name, role="server", host=f"host-{name}", status=status)
        own.counters = dict((counters or {}).get(name, {}))
        _write_member(folder, own, _series(now, total, serving))
    if event:
        lost = RecordedEvent(time_seconds=now, member=names[-1], kind="lost", text=event)
        folder.add_event(lost)
    record.summarise(folder, status)
    return folder


def _step(
    step: int, own: Times, scale: float, ready: float, exchanged: float, end: float, batch: int
) -> Step:
    phases = {"input": own.input, "forward": own.forward, "backward": own.backward}
    breakdown = {name: seconds * scale for name, seconds in phases.items()}
    breakdown |= {"exchange_exposed": exchanged - ready, "update": end - exchanged}
    start = ready - own.until_ready * scale
    return Step(
        step=step,
        start_seconds=start,
        end_seconds=end,
        breakdown_seconds=breakdown,
        samples=batch,
        ready_seconds=ready,
    )


def _shifted(entry: Step, by_seconds: float) -> Step:
    entry.start_seconds += by_seconds
    entry.end_seconds += by_seconds
    if entry.ready_seconds is not None:
        entry.ready_seconds += by_seconds
    return entry


def _shifted_sample(sample: Sample, by_seconds: float) -> Sample:
    sample.time_seconds += by_seconds
    return sample


def _series(end: float, total_bytes: float, machine: Machine) -> list[Sample]:
    """Samples a second apart, the last one at the end; bytes flow evenly."""
    moments = [end - back for back in range(int(end - START), -1, -1)]
    per_second = total_bytes / (end - START)
    packets = int(per_second / 1500)
    return [
        Sample(
            time_seconds=moment,
            cpu_fraction=machine.cpu_fraction,
            cpu_wait_fraction=machine.cpu_wait_fraction,
            machine_cpu_fraction=machine.machine_cpu_fraction,
            available_bytes=machine.available_bytes,
            children_cpu_fraction=machine.children_cpu_fraction,
            rss_bytes=300 * MB,
            bytes_sent=int(per_second),
            bytes_received=int(per_second),
            packets_sent=packets,
            packets_received=packets,
        )
        for moment in moments
    ]


def _write_member(folder: RunFolder, member: MemberRecord, series: list[Sample]) -> None:
    _write_lines(folder, f"{member.name}.series.jsonl", series)
    member.cpu_fraction = series[0].cpu_fraction
    member.bytes_sent = sum(sample.bytes_sent or 0 for sample in series)
    member.bytes_received = sum(sample.bytes_received or 0 for sample in series)
    member.packets_sent = sum(sample.packets_sent or 0 for sample in series)
    member.packets_received = sum(sample.packets_received or 0 for sample in series)
    member.max_rss_bytes = 300 * MB
    folder.write_member(member)


def _write_lines(folder: RunFolder, name: str, entries: list[Step] | list[Sample]) -> None:
    content = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
    (folder.path / "members" / name).write_bytes(content)


def names(found: Explanation) -> list[str]:
    """Of what an explanation calls the causes, the worst first."""
    return [cause.name for cause in found.causes]


def rewritten(run: RunFolder, change: Callable[[str, dict], dict]) -> RunFolder:
    """The same run, with every worker's steps changed."""
    for file in (run.path / "members").glob("worker*.steps.jsonl"):
        entries = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
        changed = [change(file.name.partition(".")[0], entry) for entry in entries]
        file.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in changed))
    return record.open_folder(run.path)
