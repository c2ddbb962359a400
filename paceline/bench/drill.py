"""What faults cost: a disturbed run laid beside the same run undisturbed.

For each fault that happened: how long until steps were as fast as before and stayed so, and which
steps had to be done again; for the whole run: the time it took longer, and whether the loss is that
of the undisturbed run. Beside it what a plain restart from the newest checkpoint would have cost.
"""

from collections.abc import Sequence
from statistics import median

import msgspec

from paceline import record, spec
from paceline.record import RunFolder, Step
from paceline.record.entries import Entry, RecordedEvent
from paceline.record.lives import undone
from paceline.record.wall import START_UP

BACK_STEPS = 3
"""So many steps in a row must be as fast as before."""

BACK_FACTOR = 1.5
"""As fast as before: within this many times the undisturbed median."""

SAME_LOSS = 1e-4
"""Losses this near each other, relatively, are the same training."""


class Cost(Entry, kw_only=True):
    """What one fault cost."""

    fault: str
    member: str
    step: int
    """Steps that were done when it happened."""

    back_seconds: float | None = None
    """From the fault until training was as fast as before; None: it never was."""

    restarted: bool = False
    undone_steps: int = 0
    undone_samples: int = 0
    """Of all workers: done before the loss, and done again."""

    plain_restart_seconds: float | None = None
    """What starting all members again from the newest checkpoint takes, by the undisturbed run."""


class DrillScore(Entry, kw_only=True, omit_defaults=False):
    """The answer of a drill."""

    format_version: int
    architecture: str
    workers: int
    servers: int
    engine: str
    costs: list[Cost]
    undisturbed_seconds: float
    """From the first step's start to the last one's end."""

    disturbed_seconds: float
    loss_difference: float | None
    """The largest relative difference of a step's loss; None where losses are unknown."""

    same_loss: bool | None


def score(undisturbed: RunFolder, disturbed: RunFolder) -> DrillScore:
    """Lay the two runs beside each other."""
    experiment = disturbed.experiment()
    events = [event for event in disturbed.events() if event.kind == "fault"]
    difference = _loss_difference(undisturbed, disturbed)
    return DrillScore(
        format_version=1,
        architecture=spec.format_architecture(experiment.architecture),
        workers=experiment.cluster.workers,
        servers=experiment.num_servers,
        engine=experiment.engine,
        costs=[_cost(event, events, undisturbed, disturbed) for event in events],
        undisturbed_seconds=_duration(undisturbed),
        disturbed_seconds=_duration(disturbed),
        loss_difference=difference,
        same_loss=None if difference is None else difference <= SAME_LOSS,
    )


def _cost(
    event: RecordedEvent,
    events: Sequence[RecordedEvent],
    undisturbed: RunFolder,
    disturbed: RunFolder,
) -> Cost:
    experiment, moment = disturbed.experiment(), event.time_seconds
    later = [other.time_seconds for other in events if other.time_seconds > moment]
    until = min(later, default=float("inf"))
    restarts = disturbed.restarts()
    restarted = any(moment <= restart < until for restart in restarts)
    cost = Cost(fault=event.text.removeprefix("fault: "), member=event.member, step=event.step or 0)
    steps = _longest(undisturbed)
    usual = median(step.seconds for step in steps[1:] or steps)
    cost.back_seconds = _back_seconds(disturbed, moment, BACK_FACTOR * usual)
    cost.restarted = restarted
    if restarted:
        lost = [
            step
            for name in _workers(disturbed)
            for step in undone(disturbed.all_steps(name), restarts)
            if step.end_seconds < until
        ]
        cost.undone_steps = len({step.step for step in lost})
        cost.undone_samples = sum(step.samples for step in lost)
    wall = undisturbed.summary().wall_seconds
    if wall is not None:
        every = experiment.workload.checkpoint_every
        since = cost.step % every if every else cost.step
        cost.plain_restart_seconds = wall.get(START_UP, 0.0) + since * usual
    return cost


def _back_seconds(run: RunFolder, moment: float, most_seconds: float) -> float | None:
    """When the worker that came back last had `BACK_STEPS` quick steps in a row."""
    backs = []
    for name in _workers(run):
        after = [step for step in run.steps(name) if step.end_seconds > moment]
        quick = [step.seconds <= most_seconds for step in after]
        found = next(
            (
                after[at].start_seconds
                for at in range(len(after) - BACK_STEPS + 1)
                if all(quick[at : at + BACK_STEPS])
            ),
            None,
        )
        if found is not None:
            backs.append(max(0.0, found - moment))
    return max(backs, default=None)


def _loss_difference(undisturbed: RunFolder, disturbed: RunFolder) -> float | None:
    one, other = record.losses_of(undisturbed), record.losses_of(disturbed)
    both = one.keys() & other.keys()
    if not both:
        return None
    return max(abs(one[step] - other[step]) / max(abs(one[step]), 1e-12) for step in both)


def _duration(run: RunFolder) -> float:
    steps = _longest(run)
    return steps[-1].end_seconds - steps[0].start_seconds


def _longest(run: RunFolder) -> list[Step]:
    return max((run.steps(name) for name in _workers(run)), key=len)


def _workers(run: RunFolder) -> list[str]:
    names = (member.name for member in run.members() if member.role == "worker")
    return [name for name in names if run.steps(name)]


def with_faults(experiment: spec.Experiment, faults: Sequence[spec.Fault]) -> spec.Experiment:
    """The experiment with these faults beside its own, watched closely enough to place them."""
    measurement = msgspec.structs.replace(experiment.measurement, sample_seconds=0.05)
    return spec.replace(experiment, faults=(*experiment.faults, *faults), measurement=measurement)
