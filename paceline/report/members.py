"""Numbers over time from a run's files, thinned to what a chart can show."""

from collections.abc import Sequence
from typing import Any

from paceline import record
from paceline.record import RunFolder, Sample

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
        before = own[0].time_seconds - interval if own else 0.0
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
    """Samples per second of all workers together, over equal stretches of the run."""
    ends = [
        (member.name, step.end_seconds + (member.clock_offset_seconds or 0.0), step.samples)
        for member in run.members()
        if member.role == "worker"
        for step in run.steps(member.name)
    ]
    moments = [end for _, end, _ in ends]
    first, last = min(moments, default=0.0), max(moments, default=0.0)
    if last <= first:
        return []
    step = (last - first) * len({name for name, _, _ in ends}) / len(ends)
    # Several steps of every worker in each stretch, or the curve would show steps, not their rate.
    stretch = max((last - first) / POINTS, 4 * step)
    counts: dict[int, int] = {}
    for _, end, samples in ends:
        place = int((end - first) / stretch)
        counts[place] = counts.get(place, 0) + samples
    whole = range(int((last - first) / stretch))  # the last stretch is cut short
    return [
        {
            "series": "all",
            "seconds": _round((place + 1) * stretch),
            "rate": _round(counts.get(place, 0) / stretch),
        }
        for place in whole
    ]


def losses(run: RunFolder, label: str) -> Values:
    """Loss of each step, and when worker 0 had finished it, in seconds after its first step.

    The first step begins when the process does; counting from its end leaves starting up out.
    """
    workers = [m.name for m in run.members() if m.role == "worker"]
    steps = {name: own for name in workers if (own := run.steps(name))}
    by_step = record.losses(steps)
    if not by_step:
        return []
    first = next(iter(steps.values()))
    start, ends = first[0].end_seconds, {s.step: s.end_seconds for s in first}
    known = [(step, loss) for step, loss in by_step.items() if step in ends]
    stride = max(1, -(-len(known) // (2 * POINTS)))
    return [
        {
            "series": label,
            "step": step,
            "seconds": _round(ends[step] - start),
            "loss": float(f"{loss:.5g}"),
        }
        for step, loss in (*known[:-1:stride], known[-1])
    ]


def staleness(run: RunFolder) -> Values:
    """Gradients of each worker by how many updates behind their weights were."""
    return [
        {"series": worker, "staleness": behind, "count": count}
        for worker, counts in record.staleness(run.members()).items()
        for behind, count in counts.items()
    ]


def _round(value: float) -> float:
    return float(f"{value:.4g}")
