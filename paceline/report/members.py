"""Numbers over time from a run's files, thinned to what a chart can show."""

import math
from collections.abc import Sequence
from typing import Any

from paceline import record
from paceline.record import RunFolder, Sample
from paceline.spec import hosts

POINTS = 150
"""Points of a line on a page; more cannot be told apart on a screen."""

Values = list[dict[str, Any]]


def series(run: RunFolder) -> Values:
    """One value per member and moment, seconds counted from the first sample, rates per second."""
    members = run.members()
    samples = {m.name: (m.clock_offset_seconds or 0.0, run.series(m.name)) for m in members}
    starts = [own[0].time_seconds + offset for offset, own in samples.values() if own]
    if not starts:
        return []
    first, interval = min(starts), run.experiment().measurement.sample_seconds
    values: Values = []
    for name, (offset, own) in samples.items():
        spacing = own[1].time_seconds - own[0].time_seconds if len(own) > 1 else interval
        before = own[0].time_seconds - spacing if own else 0.0
        size = -(-len(own) // POINTS)
        for begin in range(0, len(own), max(1, size)):
            batch = own[begin : begin + size]
            end = batch[-1].time_seconds
            values.append(
                {
                    "series": name,
                    "seconds": _round(end + offset - first),
                    **_rates(batch, max(end - before, 1e-9)),
                }
            )
            before = end
    return values


def _rates(batch: Sequence[Sample], seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    counters = (
        ("sent", "bytes_sent", 1e6),
        ("received", "bytes_received", 1e6),
        ("packets_sent", "packets_sent", 1.0),
        ("packets_received", "packets_received", 1.0),
    )
    for name, counter, unit in counters:
        counts = [value for s in batch if (value := getattr(s, counter)) is not None]
        if counts:
            found[name] = _round(sum(counts) / unit / seconds)
    cpu = [s.cpu_fraction for s in batch if s.cpu_fraction is not None]
    if cpu:
        found["cpu"] = _round(sum(cpu) / len(cpu))
    memory = [s.rss_bytes for s in batch if s.rss_bytes is not None]
    if memory:
        found["memory"] = _round(max(memory) / 1e6)
    return found


def throughput(run: RunFolder) -> Values:
    """Samples per second of all workers together, over equal stretches of the run.

    A step's samples are spread over the time it took: a stretch that happens to hold the ends of
    fewer steps is no dip, and one that holds a pause is.
    """
    spans = [
        (step.start_seconds + offset, step.end_seconds + offset, step.samples)
        for member in run.members()
        if member.role == "worker"
        for offset in [member.clock_offset_seconds or 0.0]
        for step in run.steps(member.name)
    ]
    first = min((start for start, _, _ in spans), default=0.0)
    last = max((end for _, end, _ in spans), default=0.0)
    if last <= first:
        return []
    stretch = (last - first) / min(POINTS, max(4, len(spans) // 2))
    counts = [0.0] * (int((last - first) / stretch) + 1)
    for start, end, samples in spans:
        _spread(counts, (start - first) / stretch, (end - first) / stretch, samples)
    whole = range(int((last - first) / stretch + 1e-6))  # a last stretch cut short is left out
    return [
        {
            "series": "all",
            "seconds": _round((place + 0.5) * stretch),
            "rate": _round(counts[place] / stretch),
        }
        for place in whole
    ]


def _spread(counts: list[float], start: float, end: float, amount: float) -> None:
    """Add `amount` to the places between `start` and `end`, to each its share."""
    if end <= start:
        counts[min(int(end), len(counts) - 1)] += amount
        return
    for place in range(int(start), min(int(end) + 1, len(counts))):
        inside = min(end, place + 1) - max(start, place)
        counts[place] += amount * max(0.0, inside) / (end - start)


def losses(run: RunFolder, label: str) -> Values:
    """Loss of each step, and when worker 0 had finished it, in seconds after its first step.

    The first step begins when the process does; counting from its end leaves starting up out.
    """
    workers = [m.name for m in run.members() if m.role == "worker"]
    steps = {name: own for name in workers if (own := run.steps(name))}
    by_step = record.losses(steps, record.gone(run))
    if not by_step:
        return []
    first = next(iter(steps.values()))
    start, ends = first[0].end_seconds, {s.step: s.end_seconds for s in first}
    known = [(step, loss) for step, loss in by_step.items() if step in ends]
    known = [(step, loss) for step, loss in known if math.isfinite(loss)]
    if not known:
        return []
    smooth = _smoothed([loss for _, loss in known])
    stride = max(1, -(-len(known) // (2 * POINTS)))
    return [
        {
            "series": label,
            "step": step,
            "seconds": _round(ends[step] - start),
            "loss": float(f"{loss:.5g}"),
            "smooth": float(f"{smooth[place]:.5g}"),
        }
        for place, (step, loss) in enumerate(known)
        if place % stride == 0 or place == len(known) - 1
    ]


def _smoothed(losses: Sequence[float]) -> list[float]:
    """A running mean that forgets: over about a twentieth of the run, with no lag at the start."""
    keep = max(0.0, 1 - 20 / max(len(losses), 20)) * 0.9
    mean, weight, found = 0.0, 0.0, []
    for loss in losses:
        mean, weight = keep * mean + loss, keep * weight + 1
        found.append(mean / weight)
    return found


def staleness(run: RunFolder) -> Values:
    """Gradients of each worker by how many updates behind their weights were."""
    return [
        {"series": worker, "staleness": behind, "count": count}
        for worker, counts in record.staleness(run.members()).items()
        for behind, count in counts.items()
    ]


def capacities(run: RunFolder) -> dict[str, float]:
    """Measure -> what there is of it at most: cores of the machine, MB/s of the slowest cable."""
    found: dict[str, float] = {}
    experiment, cores = run.experiment(), run.machine().get("cores")
    if isinstance(cores, int):
        found["cpu"] = float(cores)
    if experiment.engine == "tunnel":
        rates = [host.link.bandwidth_bits_per_second / 8e6 for host in hosts.place(experiment)]
        found["sent"] = found["received"] = _round(min(rates))
    return found


def _round(value: float) -> float:
    return float(f"{value:.4g}")
