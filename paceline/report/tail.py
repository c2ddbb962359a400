"""A running job, read from its files as they grow. Each look reads only what is new."""

import time
from collections import deque
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from paceline import record
from paceline.errors import RecordError
from paceline.explain import explain
from paceline.record import MemberRecord, RecordedEvent, RunFolder, Sample, Step

WINDOW_STEPS = 50
"""Recent steps of each worker that the figures of a look are made of."""

HISTORY = 240
"""Points kept of throughput and loss; older ones are thinned."""

VERDICT_SECONDS = 5.0
"""Time between two verdicts on a run that goes on."""

VERDICT_COST = 30
"""And so many times as long as the last one took."""

RATE_SECONDS = 1.0
"""Time that one point of the throughput's curve stands for, at least."""

SILENT_SAMPLES, SILENT_SECONDS = 4, 3.0
"""A member whose files stand still for this long, while others' grow, is taken for dead."""

E = TypeVar("E")


class Lines(Generic[E]):
    """The entries of a growing JSON-lines file."""

    def __init__(self, path: Path, kind: type[E]) -> None:
        self._path, self._decoder = path, msgspec.json.Decoder(kind)
        self._offset, self._partial = 0, b""

    def new(self) -> list[E]:
        """What was added since the last call; a line in the making waits for the next."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(content)
        *lines, self._partial = (self._partial + content).split(b"\n")
        return [self._decoder.decode(line) for line in lines]


class History:
    """Points of a curve, at most `HISTORY`: when full, every second one goes."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._stride, self._skipped = 1, 0

    def add(self, x: float, y: float) -> None:
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self.points.append((x, y))
        if len(self.points) > HISTORY:
            self.points, self._stride = self.points[::2], self._stride * 2


class MemberTail:
    """One member's files."""

    def __init__(self, folder: RunFolder, name: str, now: float) -> None:
        self.name = name
        self._file = folder.path / "members" / f"{name}.json"
        self._steps = Lines(folder.path / "members" / f"{name}.steps.jsonl", Step)
        self._series = Lines(folder.path / "members" / f"{name}.series.jsonl", Sample)
        self._changed_ns = 0
        self.description: MemberRecord | None = None
        self.recent: deque[Step] = deque(maxlen=WINDOW_STEPS)
        self.samples: deque[Sample] = deque(maxlen=2)
        self.grew_seconds = now

    def look(self, now: float) -> list[Step]:
        """Read what is new; returns the new steps."""
        changed_ns = self._file.stat().st_mtime_ns
        if changed_ns != self._changed_ns:
            self._changed_ns = changed_ns
            self.description = msgspec.json.decode(self._file.read_bytes(), type=MemberRecord)
        steps, samples = self._steps.new(), self._series.new()
        if steps or samples:
            self.grew_seconds = now
        self.recent.extend(steps)
        self.samples.extend(samples)
        return steps


class RunTail:
    """A run as it goes. `look()` gives all that the live page shows, as plain data."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._experiment = folder.experiment()
        self._together = self._experiment.architecture.waits_for_all
        self._members: dict[str, MemberTail] = {}
        self._events = Lines(folder.path / "events.jsonl", RecordedEvent)
        self._said: deque[RecordedEvent] = deque(maxlen=20)
        self._totals: dict[int, tuple[float, int, int]] = {}
        self._losses, self._rates = History(), History()
        self._first_seconds: float | None = None
        self._open_rate = (0.0, 0.0)
        self._judge_again_seconds = 0.0
        self._said_so_far: str | None = None

    def look(self) -> dict[str, Any]:
        now = time.monotonic()
        self._find_members(now)
        fresh = [step for tail in self._members.values() for step in tail.look(now)]
        for step in fresh:
            self._add_loss(step)
        self._add_rates(fresh)
        self._said.extend(self._events.new())
        summary = self.folder.summary()
        running, rate = summary.status == "running", self._rate()
        if not running and summary.samples_per_second is not None:
            rate = summary.samples_per_second
        late = self._late()
        return {
            "name": summary.name or self.folder.path.resolve().name,
            "model": summary.subject,
            "architecture": summary.architecture,
            "status": summary.status,
            "verdict": self._verdict(summary, now),
            "step": max((t.recent[-1].step + 1 for t in self._workers() if t.recent), default=0),
            "steps": self._experiment.workload.steps or None,
            "samples_per_second": rate,
            "breakdown_ms": self._breakdown(),
            "loss": self._losses.points,
            "rate": self._rates.points,
            "members": [self._member(t, now, summary.status, late) for t in self._ordered()],
            "events": [f"{event.member}: {event.text}" for event in self._said],
        }

    def _verdict(self, summary: record.Summary, now: float) -> str | None:
        """The run's own at its end; until then what `explain` says of it so far, now and then."""
        if summary.verdict is not None:
            return summary.verdict
        if now < self._judge_again_seconds:
            return self._said_so_far
        began = time.monotonic()
        try:
            self._said_so_far = f"So far: {explain(self.folder).verdict}"
        except RecordError:  # no step yet
            self._said_so_far = None
        # A verdict reads the whole record: a long one is judged less often.
        took = time.monotonic() - began
        self._judge_again_seconds = now + max(VERDICT_SECONDS, VERDICT_COST * took)
        return self._said_so_far

    def _add_rates(self, fresh: list[Step]) -> None:
        """Throughput over the run's own time, from its steps: opened late, the page shows all."""
        workers = max(1, self._experiment.cluster.workers)
        for step in sorted(fresh, key=lambda one: one.end_seconds):
            if self._first_seconds is None:
                self._first_seconds = step.start_seconds
            at = step.end_seconds - self._first_seconds
            since, samples = self._open_rate
            samples += step.samples
            if at - since >= max(RATE_SECONDS, 2 * step.seconds) and samples > workers:
                self._rates.add(at, samples / (at - since))
                since, samples = at, 0.0
            self._open_rate = since, samples

    def _find_members(self, now: float) -> None:
        for file in (self.folder.path / "members").glob("*.json"):
            name = file.stem
            if name not in self._members and not name.startswith("."):
                self._members[name] = MemberTail(self.folder, name, now)

    def _ordered(self) -> list[MemberTail]:
        return sorted(self._members.values(), key=lambda t: (t.name[:6] != "worker", _number(t)))

    def _workers(self) -> list[MemberTail]:
        return [t for t in self._ordered() if t.description and t.description.role == "worker"]

    def _add_loss(self, step: Step) -> None:
        if step.loss is None:
            return
        total, samples, reports = self._totals.pop(step.step, (0.0, 0, 0))
        total, samples = total + step.loss * step.samples, samples + step.samples
        if reports + 1 == self._experiment.cluster.workers and samples:
            self._losses.add(step.step, total / samples)
        else:
            self._totals[step.step] = (total, samples, reports + 1)

    def _rate(self) -> float | None:
        rates = [
            sum(s.samples for s in t.recent)
            / max(t.recent[-1].end_seconds - t.recent[0].start_seconds, 1e-9)
            for t in self._workers()
            if t.recent
        ]
        return sum(rates) if rates else None

    def _split(self) -> dict[str, list[Step]]:
        """Recent steps of all workers, waiting told from exchanging."""
        steps = {t.name: list(t.recent) for t in self._workers() if t.recent}
        if not self._together:
            return steps
        offsets = {t.name: _offset(t) for t in self._workers()}
        return record.split_wait(steps, offsets)

    def _breakdown(self) -> dict[str, float]:
        split = [step for own in self._split().values() for step in own]
        if not split:
            return {}
        parts = {
            phase: 1e3 * sum(s.breakdown_seconds.get(phase, 0.0) for s in split) / len(split)
            for phase in record.PHASES
        }
        whole = 1e3 * sum(s.end_seconds - s.start_seconds for s in split) / len(split)
        return {**parts, "other": max(0.0, whole - sum(parts.values()))}

    def _late(self) -> dict[str, float]:
        """Milliseconds each worker's gradients come after the first worker's, on average."""
        if not self._together:
            return {}
        ready: dict[int, dict[str, float]] = {}
        for tail in self._workers():
            for step in tail.recent:
                if step.ready_seconds is not None:
                    ready.setdefault(step.step, {})[tail.name] = step.ready_seconds + _offset(tail)
        workers = len(self._workers())
        complete = [moments for moments in ready.values() if len(moments) == workers > 1]
        return {
            name: 1e3 * sum(m[name] - min(m.values()) for m in complete) / len(complete)
            for name in (complete[0] if complete else {})
        }

    def _member(
        self, tail: MemberTail, now: float, status: str, late: dict[str, float]
    ) -> dict[str, Any]:
        about, sample = tail.description, tail.samples[-1] if tail.samples else None
        durations = [s.end_seconds - s.start_seconds for s in tail.recent]
        seconds = self._experiment.measurement.sample_seconds
        if len(tail.samples) == 2:
            seconds = max(tail.samples[1].time_seconds - tail.samples[0].time_seconds, 1e-9)
        return {
            "name": tail.name,
            "host": about.host if about else "",
            "status": self._status(tail, now, status),
            "step": tail.recent[-1].step + 1 if tail.recent else None,
            "step_ms": 1e3 * sum(durations) / len(durations) if durations else None,
            "late_ms": late.get(tail.name),
            "cpu": sample.cpu_fraction if sample else None,
            "memory_bytes": sample.rss_bytes if sample else None,
            "sent": _per_second(sample.bytes_sent if sample else None, seconds),
            "received": _per_second(sample.bytes_received if sample else None, seconds),
        }

    def _status(self, tail: MemberTail, now: float, run_status: str) -> str:
        """running, finished, failed, or silent: dead as far as its files tell."""
        own = tail.description.status if tail.description else "running"
        lost = any(event.kind == "lost" and event.member == tail.name for event in self._said)
        if lost or own in ("failed", "lost"):
            return "failed"
        if own != "running":
            return own
        if run_status != "running":
            return "ended"
        patience = max(SILENT_SAMPLES * self._experiment.measurement.sample_seconds, SILENT_SECONDS)
        newest = max(other.grew_seconds for other in self._members.values())
        others_move = newest - tail.grew_seconds > patience
        return "silent" if others_move or now - tail.grew_seconds > 5 * patience else "running"


def attach(path: Path) -> RunTail:
    """The run at `path`, running or not."""
    folder = record.open_folder(path)
    if not (path / "members").is_dir():
        raise RecordError(f"{path} has no members to watch")
    return RunTail(folder)


def _offset(tail: MemberTail) -> float:
    return (tail.description.clock_offset_seconds or 0.0) if tail.description else 0.0


def _per_second(count: int | None, seconds: float) -> float | None:
    return None if count is None else count / seconds


def _number(tail: MemberTail) -> int:
    digits = "".join(character for character in tail.name if character.isdigit())
    return int(digits or 0)
