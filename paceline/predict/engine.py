"""The engine `predict`: answers an experiment with a run that never ran.

The record is that of any other run, so that `explain`, `compare` and `report` read it. Workers that
behave alike are written once each up to a number; the summary is of all.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from paceline import record, spec
from paceline.launch.faults import check_faults
from paceline.predict.answer import Predicted, predict
from paceline.predict.codecs import codec_of
from paceline.predict.devices import profile_for
from paceline.predict.outcome import ClassStep, Outcome
from paceline.protocol.placement import shares, worker_of
from paceline.protocol.plan import Shape, placement_of
from paceline.record import RunFolder
from paceline.spec.hosts import place

WRITTEN_MEMBERS = 32
"""So many of each role get files of their own."""

MOST_STEPS = 50


def predicted(
    experiment: spec.Experiment,
    path: Path,
    *,
    output: Callable[..., None] = lambda *said: None,
    progress: Callable[[int], None] = lambda steps: None,
) -> RunFolder:
    """Predict the experiment and leave it as a run folder."""
    found = check(experiment)
    folder = RunFolder.create(path, experiment)
    steps = min(MOST_STEPS, experiment.workload.num_steps(experiment.cluster.workers, 50_000))
    _write_members(folder, experiment, found.outcome, steps)
    _note(folder, f"predicted, not run: {_basis(experiment)}")
    low, high = found.low, found.high
    _note(folder, f"nine times in ten between {low:.4g} and {high:.4g} samples/s")
    folder.write_summary(_summary(folder, experiment, found, steps))
    progress(steps)
    return folder


def check(experiment: spec.Experiment) -> Predicted:
    """Raise for what cannot be predicted, by predicting it."""
    check_faults(experiment)
    return predict(experiment)


def _basis(experiment: spec.Experiment) -> str:
    device = experiment.cluster.device
    profile = profile_for(experiment, device)
    return f"{profile.kind} profile of {profile.model} on {device} ({profile.source})"


def _note(folder: RunFolder, text: str) -> None:
    folder.add_event(
        record.RecordedEvent(time_seconds=0.0, member="predict", kind="note", text=text)
    )


def _write_members(
    folder: RunFolder, experiment: spec.Experiment, outcome: Outcome, steps: int
) -> None:
    hosts = {member: host.name for host in place(experiment) for member in host.members}
    for role in ("worker", "server"):
        traffic = _traffic(experiment, outcome, role)[:WRITTEN_MEMBERS]
        for index, (sent, received) in enumerate(traffic):
            name = f"{role}{index}"
            member = record.MemberRecord(
                name=name,
                role=role,
                host=hosts[name],
                status="finished",
                bytes_sent=None if sent is None else sent * steps,
                bytes_received=None if received is None else received * steps,
            )
            folder.write_member(member)
            pace = _pace_of(outcome, index) if role == "worker" else _typical(outcome)
            _write_series(folder, name, pace, steps, (sent, received))
            if role == "worker":
                _write_steps(folder, experiment, name, pace, steps)
    left = max(0, experiment.cluster.workers - WRITTEN_MEMBERS)
    if left:
        _note(folder, f"{left} more workers behave like these and have no files of their own")


def _typical(outcome: Outcome) -> ClassStep:
    return ClassStep(workers=0, step_seconds=outcome.step_seconds, phases=outcome.phases)


def _pace_of(outcome: Outcome, worker: int) -> ClassStep:
    """How fast this worker goes: workers are numbered in the order of hosts."""
    for pace in outcome.paces:
        if worker < pace.workers:
            return pace
        worker -= pace.workers
    return _typical(outcome)


Moved = tuple[int | None, int | None]
"""Bytes sent and received; None where the architecture does not say."""


def _traffic(experiment: spec.Experiment, outcome: Outcome, role: str) -> Sequence[Moved]:
    """Bytes that each member of a role sends and receives in a step."""
    if outcome.worker_bytes and role == "worker":
        return outcome.worker_bytes
    count = experiment.cluster.workers if role == "worker" else experiment.num_servers
    exchanging = _exchanging(experiment)
    each: Moved = _traffic_of_one(experiment, role, len(exchanging)) if count else (0, 0)
    return [each if role == "server" or one in exchanging else (0, 0) for one in range(count)]


def _exchanging(experiment: spec.Experiment) -> Collection[int]:
    """Workers that send anything: all, or of each host one."""
    if not experiment.architecture.sums_in_host:
        return range(experiment.cluster.workers)
    hosts = [[worker_of(member) for member in host.members] for host in place(experiment)]
    workers = [[worker for worker in host if worker is not None] for host in hosts]
    return {min(host) for host in workers if host}


def _traffic_of_one(experiment: spec.Experiment, role: str, workers: int) -> Moved:
    """By the closed forms of its architecture, in which all that exchange are alike."""
    servers = experiment.num_servers
    size = profile_for(experiment, experiment.cluster.device).parameter_bytes
    kind = experiment.architecture
    if kind.serving is None:
        copies = kind.copies_sent(workers, experiment.workload.optimizer.state_numbers)
        moved = None if copies is None else round(copies * size)
        return moved, moved
    placement = placement_of(kind.serving, Shape(workers=workers, servers=servers))
    inside, apart = shares(placement, workers, servers)
    pushed = codec_of(kind).sent_fraction
    if role == "server":
        whole = workers * apart * size
        return round(whole), round(pushed * whole)
    away, served = (1 - inside) * size, (workers - 1) * inside * size
    return round(pushed * away + served), round(away + pushed * served)


def _write_series(folder: RunFolder, name: str, pace: ClassStep, steps: int, moved: Moved) -> None:
    """What the member's cable carried, a sample for each step."""
    samples = [
        record.Sample(
            time_seconds=(step + 1) * pace.step_seconds,
            bytes_sent=moved[0],
            bytes_received=moved[1],
        )
        for step in range(steps)
    ]
    folder.write_series(name, samples)


def _write_steps(
    folder: RunFolder, experiment: spec.Experiment, name: str, pace: ClassStep, steps: int
) -> None:
    workers = experiment.cluster.workers
    samples = experiment.workload.global_batch_for(workers) // workers
    seconds, phases = pace.step_seconds, pace.phases
    until_ready = phases["input"] + phases["forward"] + phases["backward"]
    entries = [
        record.Step(
            step=step,
            start_seconds=step * seconds,
            end_seconds=(step + 1) * seconds,
            breakdown_seconds=phases,
            samples=samples,
            ready_seconds=step * seconds + until_ready,
        )
        for step in range(steps)
    ]
    folder.write_steps(name, entries)


def _summary(
    folder: RunFolder, experiment: spec.Experiment, found: Predicted, steps: int
) -> record.Summary:
    summary = record.empty_summary(experiment, "finished")
    outcome = found.outcome
    summary.members = folder.members()
    summary.steps = steps
    summary.samples_per_second = outcome.samples_per_second
    seconds = outcome.step_seconds
    summary.step_seconds = record.StepSeconds(median=seconds, p95=seconds, jitter=0.0)
    summary.breakdown_seconds = outcome.phases
    roles = ("worker", "server")
    sent = [sent for role in roles for sent, _ in _traffic(experiment, outcome, role)]
    known = [size for size in sent if size is not None]
    if len(known) == len(sent):
        summary.bytes_per_step = float(sum(known))
    summary.interval = {"low": found.low, "high": found.high}
    summary.limited_by = found.limit
    notes = [event.text for event in folder.events() if event.kind == "note"]
    summary.notes = list(dict.fromkeys(notes))
    return summary
