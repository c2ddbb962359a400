"""What a run's files say, as numbers per step. Judges nothing."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from paceline import record, spec
from paceline.errors import RecordError
from paceline.record import PHASES, Member, RunFolder, Sample, Step
from paceline.spec.hosts import place


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """One worker's mean step, in seconds."""

    name: str
    steps: int
    step_seconds: float
    phases: dict[str, float]
    """Every phase of `record.PHASES`; together at most the step."""

    samples: float
    late_seconds: float = 0.0
    """How long after the first worker its gradients were ready."""

    last_fraction: float = 0.0
    """Share of the steps in which it was the last to be ready."""

    @property
    def compute_seconds(self) -> float:
        return sum(self.phases[phase] for phase in ("forward", "backward", "update"))

    @property
    def overhead_seconds(self) -> float:
        return self.step_seconds - sum(self.phases.values())


@dataclass(frozen=True, kw_only=True)
class MemberTraffic:
    """What one member's link carried in one step of the typical worker."""

    bytes_sent: float
    bytes_received: float
    cpu_seconds: float | None
    """CPU time it used in that while."""

    serving_seconds: float | None = None
    """How long it summed and updated, where it serves."""

    @property
    def busier_bytes(self) -> float:
        return max(self.bytes_sent, self.bytes_received)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run, ready to be judged."""

    name: str
    experiment: spec.Experiment
    summary: record.Summary
    architecture: spec.Architecture
    workers: tuple[WorkerFacts, ...]
    members: tuple[Member, ...]
    cores: int
    traffic: dict[str, MemberTraffic] = field(default_factory=dict)
    links: dict[str, spec.Link] = field(default_factory=dict)

    @property
    def typical(self) -> WorkerFacts:
        """The worker in the middle by own time (input and compute); the faster of two."""
        ordered = sorted(self.workers, key=own_seconds)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def pacemaker(self) -> WorkerFacts:
        """Who sets the pace: the slowest worker where all wait for it, else the typical one."""
        if not record.waits_for_all(self.architecture):
            return self.typical
        return max(self.workers, key=own_seconds)

    @property
    def servers(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == "server")

    @property
    def samples_per_second(self) -> float:
        return sum(worker.samples / worker.step_seconds for worker in self.workers)

    @property
    def exchanges(self) -> bool:
        return self.summary.workers > 1 or bool(self.servers)


def own_seconds(worker: WorkerFacts) -> float:
    """What the worker does alone in a step."""
    return worker.phases["input"] + worker.compute_seconds + worker.overhead_seconds


def gather(run: RunFolder, link: str = "") -> Facts:
    """Read a run; `link` names the rate of the cables where the experiment does not."""
    experiment, summary = run.experiment(), run.summary()
    members = tuple(run.members()) or tuple(summary.members)
    if summary.architecture.partition(":")[0] not in spec.ARCHITECTURES:
        inside = "what happens inside its steps is not in the record"
        raise RecordError(f"{run.path} was measured with a peer, {summary.architecture}: {inside}")
    architecture = spec.parse_architecture(summary.architecture, str(run.path))
    steps = {m.name: run.steps(m.name) for m in members if m.role == "worker"}
    steps = {name: entries for name, entries in steps.items() if entries}
    warmup = experiment.measurement.warmup_steps
    cores = run.machine().get("cores")
    facts = Facts(
        name=summary.name or run.path.name,
        experiment=experiment,
        summary=summary,
        architecture=architecture,
        workers=_workers(steps, members, warmup, architecture)
        if steps
        else _from_summary(summary, run),
        members=members,
        cores=cores if isinstance(cores, int) else 0,
        links=links(experiment, members, link),
    )
    if steps:
        window = {name: record.counted(entries, warmup) for name, entries in steps.items()}
        facts.traffic.update(_traffic(run, members, window, facts.typical))
    return facts


def _workers(
    steps: dict[str, list[Step]],
    members: Sequence[Member],
    warmup: int,
    architecture: spec.Architecture,
) -> tuple[WorkerFacts, ...]:
    offsets = {m.name: m.clock_offset_seconds or 0.0 for m in members}
    together = record.waits_for_all(architecture)
    told = record.split_wait(steps, offsets) if together else steps
    counted = {name: record.counted(entries, warmup) for name, entries in told.items()}
    late, last = _lateness(counted, offsets) if together else ({}, {})
    return tuple(
        _mean_step(name, entries, late.get(name, 0.0), last.get(name, 0.0))
        for name, entries in counted.items()
    )


def _mean_step(name: str, steps: Sequence[Step], late: float, last: float) -> WorkerFacts:
    return WorkerFacts(
        name=name,
        steps=len(steps),
        step_seconds=fmean(s.end_seconds - s.start_seconds for s in steps),
        phases={p: fmean(s.breakdown_seconds.get(p, 0.0) for s in steps) for p in PHASES},
        samples=fmean(s.samples for s in steps),
        late_seconds=late,
        last_fraction=last,
    )


def _lateness(
    steps: dict[str, Sequence[Step]], offsets: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Mean time after the first worker, and how often the last; over steps all have reported."""
    ready: dict[int, dict[str, float]] = {}
    for name, entries in steps.items():
        for entry in entries:
            if entry.ready_seconds is not None:
                moment = entry.ready_seconds + offsets.get(name, 0.0)
                ready.setdefault(entry.step, {})[name] = moment
    complete = [moments for moments in ready.values() if len(moments) == len(steps)]
    if not complete or len(steps) < 2:
        return {}, {}
    late = {name: fmean(m[name] - min(m.values()) for m in complete) for name in steps}
    lasts = [max(m, key=m.__getitem__) for m in complete]
    return late, {name: lasts.count(name) / len(lasts) for name in steps}


def _from_summary(summary: record.Summary, run: RunFolder) -> tuple[WorkerFacts, ...]:
    """A run without step files (a prediction, a peer): its summary stands for every worker."""
    if not isinstance(summary.step_seconds, record.StepSeconds):
        problem = f"{run.path} has no finished step to explain (status: {summary.status})"
        raise RecordError(problem)
    known = summary.breakdown_seconds if isinstance(summary.breakdown_seconds, dict) else {}
    one = WorkerFacts(
        name="worker0",
        steps=summary.steps if isinstance(summary.steps, int) else 1,
        step_seconds=max(summary.step_seconds.median, sum(known.values())),
        phases={phase: known.get(phase, 0.0) for phase in PHASES},
        samples=(
            summary.global_batch / summary.workers if isinstance(summary.global_batch, int) else 0.0
        ),
    )
    return tuple(
        WorkerFacts(**{**vars(one), "name": f"worker{rank}"}) for rank in range(summary.workers)
    )


def _traffic(
    run: RunFolder,
    members: Sequence[Member],
    window: dict[str, Sequence[Step]],
    typical: WorkerFacts,
) -> dict[str, MemberTraffic]:
    """Bytes and CPU time of each member per step, from its samples while steps were counted."""
    offsets = {m.name: m.clock_offset_seconds or 0.0 for m in members}
    start = min(own[0].start_seconds + offsets.get(n, 0.0) for n, own in window.items())
    end = max(own[-1].end_seconds + offsets.get(n, 0.0) for n, own in window.items())
    steps = (end - start) / typical.step_seconds
    experiment = run.experiment()
    interval, dilation = experiment.measurement.sample_seconds, experiment.cluster.dilation
    all_steps = max(own[-1].step + 1 for own in window.values())
    found = {}
    for member in members:
        series = run.series(member.name)
        if not series or steps <= 0 or series[0].bytes_sent is None:
            continue
        offset = offsets[member.name]

        def per_step(counter: str, series: list[Sample] = series, offset: float = offset) -> float:
            totals = _counts(series, counter, interval)
            return _between(totals, start - offset, end - offset) / steps

        has_cpu = series[0].cpu_fraction is not None
        busy = member.counters.get("busy_seconds")
        found[member.name] = MemberTraffic(
            bytes_sent=per_step("bytes_sent"),
            bytes_received=per_step("bytes_received"),
            cpu_seconds=per_step("cpu_fraction") if has_cpu else None,
            serving_seconds=busy / all_steps / dilation if isinstance(busy, float) else None,
        )
    return found


def _counts(
    series: Sequence[Sample], counter: str, interval_seconds: float
) -> list[tuple[float, float]]:
    """The running total of a counter at each sample, from the start of the first one on."""
    total, totals = 0.0, [(series[0].time_seconds - interval_seconds, 0.0)]
    for sample in series:
        amount = getattr(sample, counter)
        if counter == "cpu_fraction":
            amount *= sample.time_seconds - totals[-1][0]
        total += amount
        totals.append((sample.time_seconds, total))
    return totals


def _between(totals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """How much a running total grew between two moments."""
    times = [moment for moment, _ in totals]

    def at(moment: float) -> float:
        after = bisect_left(times, moment)
        if after in (0, len(times)):
            return totals[min(after, len(times) - 1)][1]
        (before, low), (then, high) = totals[after - 1], totals[after]
        return low + (high - low) * (moment - before) / (then - before)

    return at(end) - at(start)


def links(
    experiment: spec.Experiment, members: Sequence[Member], given: str
) -> dict[str, spec.Link]:
    """The cable of each member's host; empty when nobody has said what it is."""
    if given:
        cable = spec.parse_link(given, "--link")
        return {member.name: cable for member in members}
    if experiment.engine == "here":
        return {}
    return {name: host.link for host in place(experiment) for name in host.members}
