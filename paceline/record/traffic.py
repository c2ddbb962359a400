"""Bytes that each member sent and received, and CPU time it used, in one step, from its samples
while steps were counted.

Samples are taken about once a second; between two of them counters are taken to grow evenly.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.record.entries import MemberRecord, Sample, Step
from paceline.record.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class MemberTraffic:
    """Traffic and CPU time of one member in one step of a typical worker."""

    bytes_sent: float
    bytes_received: float
    packets_sent: float
    cpu_seconds: float | None
    """CPU time it used in that while, with its child processes."""

    children_cpu_seconds: float = 0.0
    """The part of it that its child processes used."""

    cpu_wait_seconds: float | None = None
    """Time that its threads were ready and had no core, added up."""

    machine_cpu_seconds: float | None = None
    """CPU time that its whole machine used meanwhile."""

    @property
    def own_cpu_seconds(self) -> float | None:
        """CPU time without that of child processes."""
        return None if self.cpu_seconds is None else self.cpu_seconds - self.children_cpu_seconds

    @property
    def busier_bytes(self) -> float:
        return max(self.bytes_sent, self.bytes_received)


def per_step(
    run: RunFolder,
    members: Sequence[MemberRecord],
    window: Mapping[str, Sequence[Step]],
    step_seconds: float,
) -> dict[str, MemberTraffic]:
    """Each member's figures over the steps in `window`, for a step of `step_seconds`.

    Bytes are those of steps, so pauses inside the window are left out of the number of steps it
    holds; a core is as busy in a pause as elsewhere.
    """
    if not window or step_seconds <= 0:
        return {}
    offsets = {m.name: m.clock_offset_seconds or 0.0 for m in members}
    start = min(own[0].start_seconds + offsets.get(n, 0.0) for n, own in window.items())
    end = max(own[-1].end_seconds + offsets.get(n, 0.0) for n, own in window.items())
    paused = max(sum(sum(s.paused_seconds.values()) for s in own[1:]) for own in window.values())
    steps = (end - start - paused) / step_seconds
    interval = run.experiment().measurement.sample_seconds
    if steps <= 0:
        return {}
    found = {}
    for member in members:
        series = run.series(member.name)
        if series and series[0].bytes_sent is not None:
            counts = _Counts(series, interval, start - offsets[member.name])
            spans = (end - start) / step_seconds
            found[member.name] = _figures(counts, end - offsets[member.name], steps, spans)
    return found


class _Counts:
    """The running totals of one member's samples, from a moment on."""

    def __init__(self, series: Sequence[Sample], interval_seconds: float, start: float) -> None:
        self._series, self._start = series, start
        self._times = [series[0].time_seconds - interval_seconds]
        self._times += [sample.time_seconds for sample in series]

    def until(self, end: float, counter: str) -> float | None:
        """Return how much a counter grew up to `end`; fractions of a core become seconds."""
        if all(getattr(sample, counter) is None for sample in self._series):
            return None
        totals = [0.0]
        pairs = zip(self._times, self._times[1:], strict=False)
        for (before, then), sample in zip(pairs, self._series, strict=True):
            amount = getattr(sample, counter) or 0.0
            totals.append(totals[-1] + amount * (then - before if "fraction" in counter else 1.0))
        return self._at(totals, end) - self._at(totals, self._start)

    def _at(self, totals: Sequence[float], moment: float) -> float:
        after = bisect_left(self._times, moment)
        if after in (0, len(self._times)):
            return totals[min(after, len(totals) - 1)]
        before, then = self._times[after - 1], self._times[after]
        low, high = totals[after - 1], totals[after]
        return low + (high - low) * (moment - before) / (then - before)


def _figures(counts: _Counts, end: float, steps: float, spans: float) -> MemberTraffic:
    """`spans`: how often a step's time fits into the window, pauses and all."""

    def one(counter: str) -> float | None:
        whole = counts.until(end, counter)
        if whole is None:
            return None
        return whole / (spans if "fraction" in counter else steps)

    return MemberTraffic(
        bytes_sent=one("bytes_sent") or 0.0,
        bytes_received=one("bytes_received") or 0.0,
        packets_sent=one("packets_sent") or 0.0,
        cpu_seconds=one("cpu_fraction"),
        children_cpu_seconds=one("children_cpu_fraction") or 0.0,
        cpu_wait_seconds=one("cpu_wait_fraction"),
        machine_cpu_seconds=one("machine_cpu_fraction"),
    )
