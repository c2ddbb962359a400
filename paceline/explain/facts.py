"""What a run's files say, as numbers per step. Judges nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from paceline import record, spec
from paceline.errors import RecordError
from paceline.protocol.plan import shares_memory, written_shape
from paceline.record import PHASES, MemberRecord, MemberTraffic, RunFolder, Step
from paceline.record.entries import OBSERVED
from paceline.record.pauses import own_pauses, total
from paceline.spec.hosts import place
from paceline.spec.profile import REAL_DEVICE

LINK_STEPS = 3
"""A cable is changed when the step is seen to be done, a little later than it is."""


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

    paused_seconds: float = 0.0
    """Pauses between two of its steps, per step."""

    own_pauses: dict[str, float] = field(default_factory=dict)
    """Those that it made itself, per step: the others waited for it."""

    entries: tuple[Step, ...] = ()
    """The steps that were counted, wait and pauses told; empty where only a summary is known."""

    @property
    def compute_seconds(self) -> float:
        return sum(self.phases[phase] for phase in ("forward", "backward", "update"))

    @property
    def overhead_seconds(self) -> float:
        return self.step_seconds - sum(self.phases.values())


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run, ready to be judged."""

    name: str
    experiment: spec.Experiment
    summary: record.Summary
    architecture: spec.Architecture
    workers: tuple[WorkerFacts, ...]
    members: tuple[MemberRecord, ...]
    cores: int
    memory_bytes: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    """Mean over the global batch of each step, as far as known; NaN where it was not finite."""

    worker_losses: dict[str, dict[int, float]] = field(default_factory=dict)
    """Each worker's own, over its part of the batch."""

    events: tuple[record.RecordedEvent, ...] = ()
    least_available_bytes: int | None = None
    traffic: dict[str, MemberTraffic] = field(default_factory=dict)
    serving: dict[str, float] = field(default_factory=dict)
    """Seconds per step that each serving member summed and updated."""

    links: dict[str, spec.Link] = field(default_factory=dict)
    racks: dict[str, str] = field(default_factory=dict)
    """The rack of each member; empty where all stand in one."""

    uplink: spec.Link | None = None
    """What joins each rack to the others."""

    @property
    def typical(self) -> WorkerFacts:
        """The worker in the middle by own time (input and compute); the faster of two."""
        ordered = sorted(self.workers, key=own_seconds)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def pacemaker(self) -> WorkerFacts:
        """Who sets the pace: the slowest worker where all wait for it, else the typical one."""
        if not self.together:
            return self.typical
        return max(self.workers, key=own_seconds)

    @property
    def servers(self) -> tuple[MemberRecord, ...]:
        return tuple(member for member in self.members if member.role == "server")

    @property
    def samples_per_second(self) -> float:
        return sum(worker.samples / worker.step_seconds for worker in self.workers)

    @property
    def exchanges(self) -> bool:
        return self.summary.workers > 1 or bool(self.servers)

    @property
    def together(self) -> bool:
        """Whether a step ends only when every worker has brought its gradients."""
        return self.architecture.waits_for_all

    @property
    def computes_here(self) -> bool:
        """Whether workers compute on this machine's cores: no emulated device, no GPU."""
        devices = {self.experiment.cluster.device}
        devices |= {host.device for host in self.experiment.cluster.hosts if host.device}
        return devices <= {REAL_DEVICE, ""}

    @property
    def shares_memory(self) -> bool:
        """Whether gradients move through memory, where no link and no counter sees them."""
        return self.would_share_memory(self.architecture)

    def would_share_memory(self, kind: spec.Architecture) -> bool:
        if self.experiment.engine != "here" or len(self.hosts) != 1:
            return False
        served = kind.serves_workers
        if served is None:
            return kind.sums_in_host
        return shares_memory(served, written_shape(self.experiment))

    @property
    def hosts_of_machine(self) -> frozenset[str]:
        """The machines in use: the tunnel's hosts are all on one."""
        return frozenset({"tunnel"}) if self.experiment.engine == "tunnel" else self.hosts

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset(member.host for member in self.members)


def own_seconds(worker: WorkerFacts) -> float:
    """What the worker does alone in a step."""
    return worker.phases["input"] + worker.compute_seconds + worker.overhead_seconds


def every_step(step: int) -> bool:
    return True


def gather(run: RunFolder, link: str = "", holds: Callable[[int], bool] = every_step) -> Facts:
    """Read a run, or those of its steps that `holds` is true of, which are one after the other.

    `link` names the rate of the cables where the experiment does not.
    """
    experiment, summary = run.experiment(), run.summary()
    members = tuple(run.members()) or tuple(summary.members)
    steps = {m.name: run.steps(m.name) for m in members if m.role == "worker"}
    steps = {name: entries for name, entries in steps.items() if entries}
    architecture = _architecture(run, summary, experiment, steps)
    warmup = experiment.measurement.warmup_steps
    machine = run.machine()
    cores, memory = machine.get("cores"), machine.get("memory_bytes")
    workers = (
        _workers(steps, members, warmup, architecture, holds)
        if steps
        else _from_summary(summary, run)
    )
    facts = Facts(
        name=summary.name or run.path.name,
        experiment=experiment,
        summary=summary,
        architecture=architecture,
        workers=workers,
        members=members,
        cores=cores if isinstance(cores, int) else 0,
        memory_bytes=memory if isinstance(memory, int) else 0,
        losses=record.losses(steps, record.gone(run)),
        worker_losses={
            name: {step.step: step.loss for step in own if step.loss is not None}
            for name, own in steps.items()
        },
        events=tuple(run.events()),
        least_available_bytes=_least_available(run, members),
        links=links(experiment, members, link, _begins(workers) if holds is not every_step else -1),
    )
    if facts.links and facts.experiment.engine == "tunnel":
        facts = replace(facts, **racks(experiment))
    if steps:
        window = {worker.name: worker.entries for worker in workers}
        found = record.per_step(run, members, window, facts.typical.step_seconds)
        facts.traffic.update(found)
        facts.serving.update(_serving(members, steps, experiment))
    return facts


def _architecture(
    run: RunFolder,
    summary: record.Summary,
    experiment: spec.Experiment,
    steps: dict[str, list[Step]],
) -> spec.Architecture:
    """How the members agreed; a peer's record can be read where it tells exchanging apart."""
    if summary.architecture.partition(":")[0] in spec.known_architectures():
        return spec.parse_architecture(summary.architecture, str(run.path))
    if summary.engine == OBSERVED:
        return experiment.architecture
    told = any("exchange_exposed" in s.breakdown_seconds for own in steps.values() for s in own)
    if told:  # our own exchange under another framework: the experiment says which
        return experiment.architecture
    inside = "what happens inside its steps is not in the record"
    raise RecordError(f"{run.path} was measured with a peer, {summary.architecture}: {inside}")


def _serving(
    members: Sequence[MemberRecord], steps: dict[str, list[Step]], experiment: spec.Experiment
) -> dict[str, float]:
    count = max(own[-1].step + 1 for own in steps.values())
    dilation = experiment.cluster.dilation if experiment.engine == "tunnel" else 1.0
    busy = {member.name: member.counters.get("busy_seconds") for member in members}
    return {n: s / count / dilation for n, s in busy.items() if isinstance(s, float)}


def _least_available(run: RunFolder, members: Sequence[MemberRecord]) -> int | None:
    samples = (sample.available_bytes for m in members for sample in run.series(m.name))
    return min((count for count in samples if count is not None), default=None)


def _workers(
    steps: dict[str, list[Step]],
    members: Sequence[MemberRecord],
    warmup: int,
    architecture: spec.Architecture,
    holds: Callable[[int], bool],
) -> tuple[WorkerFacts, ...]:
    offsets = {m.name: m.clock_offset_seconds or 0.0 for m in members}
    together = architecture.waits_for_all
    waited = record.split_wait(steps, offsets) if together else steps
    counted = {
        name: [step for step in record.counted(entries, warmup) if holds(step.step)]
        for name, entries in record.tell_pauses(waited).items()
    }
    counted = {name: entries for name, entries in counted.items() if entries}
    late, last = _lateness(counted, offsets) if together else ({}, {})
    pauses = own_pauses(waited)
    return tuple(
        _mean_step(name, entries, late.get(name, 0.0), last.get(name, 0.0), pauses[name])
        for name, entries in counted.items()
    )


def _mean_step(
    name: str,
    steps: Sequence[Step],
    late: float,
    last: float,
    pauses: dict[int, dict[str, float]],
) -> WorkerFacts:
    made: dict[str, float] = {}
    for step in steps:
        for what, seconds in pauses.get(step.step, {}).items():
            made[what] = made.get(what, 0.0) + seconds / len(steps)
    return WorkerFacts(
        own_pauses=made,
        name=name,
        steps=len(steps),
        step_seconds=fmean(s.seconds for s in steps),
        phases={p: fmean(s.breakdown_seconds.get(p, 0.0) for s in steps) for p in PHASES},
        samples=fmean(s.samples for s in steps),
        late_seconds=late,
        last_fraction=last,
        paused_seconds=fmean(total(s) for s in steps),
        entries=tuple(steps),
    )


def _lateness(
    steps: dict[str, list[Step]], offsets: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Mean time after the first worker, and how often the last; over steps all have reported.

    Who wrote a checkpoint before a step was late for that, and is not slow.
    """
    ready: dict[int, dict[str, float]] = {}
    for name, entries in steps.items():
        for entry in entries:
            if entry.ready_seconds is not None and not entry.paused_seconds:
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
    if summary.step_seconds is None:
        problem = f"{run.path} has no finished step to explain (status: {summary.status})"
        raise RecordError(problem)
    known = summary.breakdown_seconds or {}
    one = WorkerFacts(
        name="worker0",
        steps=summary.steps if summary.steps is not None else 1,
        step_seconds=max(summary.step_seconds.median, sum(known.values())),
        phases={phase: known.get(phase, 0.0) for phase in PHASES},
        samples=(
            summary.global_batch / summary.workers if summary.global_batch is not None else 0.0
        ),
    )
    return tuple(
        WorkerFacts(**{**vars(one), "name": f"worker{rank}"}) for rank in range(summary.workers)
    )


def _begins(workers: Sequence[WorkerFacts]) -> int:
    return min(worker.entries[0].step for worker in workers if worker.entries)


def racks(experiment: spec.Experiment) -> dict[str, Any]:
    """The rack of each member and the uplink that joins racks; empty where there is one rack."""
    hosts, uplink = place(experiment), experiment.cluster.uplink
    found = {name: host.rack for host in hosts for name in host.members}
    if not uplink or len(set(found.values())) < 2:
        return {}
    return {"racks": found, "uplink": spec.parse_link(uplink, "[cluster]")}


def links(
    experiment: spec.Experiment, members: Sequence[MemberRecord], given: str, step: int = -1
) -> dict[str, spec.Link]:
    """The cable of each member's host; empty when nobody has said what it is.

    At `step`, where a fault that was asked for has given a host another one by then.
    """
    if given:
        cable = spec.parse_link(given, "--link")
        return {member.name: cable for member in members}
    if experiment.engine == "here":
        return {}
    hosts = place(experiment)
    found = {name: host.link for host in hosts for name in host.members}
    for fault in sorted(experiment.faults, key=lambda fault: fault.at_step):
        if fault.kind == "link" and fault.at_step <= step + LINK_STEPS:
            host = next(host for host in hosts if fault.member in host.members)
            found |= dict.fromkeys(host.members, spec.parse_link(fault.link, "[[faults]]"))
    return found
