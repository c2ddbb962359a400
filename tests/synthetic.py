"""Run folders written by hand, with the cause of their slowness planted. No process is started."""

import random
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline import record, spec
from paceline.record import Member, RunFolder, Sample, Step

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
) -> RunFolder:
    """A run in which every step ends for all when the last worker is ready, plus the exchange.

    A worker sends and receives `exchange_bytes` per step; servers share what all workers send.
    """
    cluster = spec.Cluster(workers=workers, servers=servers, link=link)
    experiment = spec.Experiment(
        name=path.name,
        workload=spec.Workload(batch=batch, steps=steps),
        architecture=spec.parse_architecture(architecture),
        cluster=cluster,
        engine="tunnel" if link else "here",
    )
    folder = RunFolder.create(path, experiment)
    (path / "machine.json").write_text('{"cores": 64, "memory_bytes": 1000000000}')
    names = [f"worker{rank}" for rank in range(workers)]
    offsets = dict(clock_offsets or {})
    generator = random.Random(seed)
    now, entries = START, {name: [] for name in names}
    for step in range(steps):
        ready = {}
        for name in names:
            own = (slow or {}).get(name, times)
            ready[name] = now + own.until_ready * (1 + jitter * generator.random())
        exchanged = max(ready.values()) + (exchange_seconds if workers + servers > 1 else 0.0)
        now = exchanged + times.update
        for name in names:
            own = (slow or {}).get(name, times)
            scale = (ready[name] - _start(entries[name], offsets.get(name, 0.0))) / own.until_ready
            entry = _step(step, own, scale, ready[name], exchanged, now, batch)
            entries[name].append(_shifted(entry, -offsets.get(name, 0.0)))
    for name in names:
        _write_lines(folder, f"{name}.steps.jsonl", entries[name])
        series = _series(now, exchange_bytes * steps, 0.95)
        series = [_shifted_sample(sample, -offsets.get(name, 0.0)) for sample in series]
        _write_member(folder, name, "worker", series, status, offsets.get(name))
    for rank in range(servers):
        total = workers * exchange_bytes * steps / servers
        _write_member(
            folder, f"server{rank}", "server", _series(now, total, server_cpu_fraction), status
        )
    record.summarise(folder, status)
    return folder


def _start(entries: list[Step], offset: float) -> float:
    return entries[-1].end_seconds + offset if entries else START


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
        loss=2.3 / (1 + 0.05 * step),
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


def _series(end: float, total_bytes: float, cpu_fraction: float) -> list[Sample]:
    """Samples a second apart, the last one at the end; bytes flow evenly."""
    moments = [end - back for back in range(int(end - START), -1, -1)]
    per_second = total_bytes / (end - START)
    packets = int(per_second / 1500)
    return [
        Sample(
            time_seconds=moment,
            cpu_fraction=cpu_fraction,
            rss_bytes=300 * MB,
            bytes_sent=int(per_second),
            bytes_received=int(per_second),
            packets_sent=packets,
            packets_received=packets,
        )
        for moment in moments
    ]


def _write_member(
    folder: RunFolder,
    name: str,
    role: str,
    series: list[Sample],
    status: str,
    offset: float | None = None,
) -> None:
    _write_lines(folder, f"{name}.series.jsonl", series)
    member = Member(
        name=name,
        role=role,
        host=f"host-{name}",
        status=status,
        cpu_fraction=series[0].cpu_fraction,
        bytes_sent=sum(sample.bytes_sent or 0 for sample in series),
        bytes_received=sum(sample.bytes_received or 0 for sample in series),
        packets_sent=sum(sample.packets_sent or 0 for sample in series),
        packets_received=sum(sample.packets_received or 0 for sample in series),
        max_rss_bytes=300 * MB,
        clock_offset_seconds=offset,
    )
    folder.write_member(member)


def _write_lines(folder: RunFolder, name: str, entries: list[Step] | list[Sample]) -> None:
    content = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
    (folder.path / "members" / name).write_bytes(content)
