"""The scaling curve: what each number of workers would give, and what limits it."""

from collections.abc import Sequence

import msgspec

from paceline import spec
from paceline.predict.answer import predict, simulate
from paceline.predict.changes import vary
from paceline.predict.devices import profile_for
from paceline.predict.failures import Failures, best_every, checkpoint_seconds, useful_fraction
from paceline.predict.outcome import Outcome
from paceline.predict.stacks import Stack
from paceline.predict.topology import topology_of

WORTH = 0.05
"""More workers that bring less than this do not help."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One number of workers."""

    workers: int
    samples_per_second: float
    low: float
    high: float
    step_seconds: float
    speedup: float
    efficiency: float
    limited_by: str
    idle_fraction: float | None = None
    """`pipeline`: of a step, in which a worker on average has nothing to compute: the schedule's
    bubble, uneven stages, and activations on their way."""

    useful_fraction: float | None = None
    """With failures: of the time, what is spent on steps that stay."""

    checkpoint_every: int | None = None
    """Steps between checkpoints, where failures were asked about."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """All points, against one worker alone."""

    architecture: str
    single_samples_per_second: float
    points: list[Point]
    enough_workers: int
    """More than these do not help, among the numbers looked at."""


def scaling_curve(
    experiment: spec.Experiment,
    workers: Sequence[int],
    failures: Failures | None = None,
    stack: Stack | None = None,
) -> Curve:
    """Predict `experiment` for each number of workers; with `failures`, what they leave."""
    alone = simulate(_alone(experiment), stack).samples_per_second
    numbers = sorted(set(workers))
    points = [_point(experiment, number, alone, failures, stack) for number in numbers]
    return Curve(
        architecture=spec.format_architecture(experiment.architecture),
        single_samples_per_second=alone,
        points=points,
        enough_workers=_enough(points),
    )


def _alone(experiment: spec.Experiment, host: spec.Host | None = None) -> spec.Experiment:
    """One worker with nobody to agree with, with the batch that each has; on a host like the first
    that computes, unless one is given."""
    computing = [host for host in experiment.cluster.hosts if host.workers]
    host = host or (computing[0] if computing else spec.Host())
    workers = experiment.cluster.workers
    batch = experiment.workload.global_batch_for(workers) // workers
    return spec.replace(
        experiment,
        architecture=spec.Single(),
        workers=1,
        servers=0,
        hosts=(spec.Host(device=host.device, slowdown=host.slowdown),),
        shares=(),
        uplink="",
        batch=batch,
        global_batch=0,
    )


def _point(
    experiment: spec.Experiment,
    workers: int,
    alone: float,
    failures: Failures | None,
    stack: Stack | None,
) -> Point:
    if workers == 1 and experiment.architecture.serves_workers is None:
        varied = _alone(experiment)
    else:
        varied = vary(experiment, workers=workers)
    found = predict(varied, stack)
    useful, every = _after_failures(varied, found.outcome.step_seconds, failures)
    return Point(
        workers=workers,
        samples_per_second=found.samples_per_second,
        low=found.low,
        high=found.high,
        step_seconds=found.outcome.step_seconds,
        speedup=found.samples_per_second / alone,
        efficiency=found.samples_per_second / _all_alone(varied, alone, stack),
        limited_by=found.limit,
        idle_fraction=_idle(varied, found.outcome),
        useful_fraction=useful,
        checkpoint_every=every,
    )


def _all_alone(experiment: spec.Experiment, alone: float, stack: Stack | None) -> float:
    """What all devices together would give if nobody waited for anything."""
    hosts = [host for host in experiment.cluster.hosts if host.workers]
    kinds = {(host.device, host.slowdown) for host in hosts}
    if len(kinds) <= 1:
        return alone * experiment.cluster.workers
    return sum(
        simulate(_alone(experiment, host), stack).samples_per_second * host.count * host.workers
        for host in hosts
    )


def _idle(experiment: spec.Experiment, outcome: Outcome) -> float | None:
    if experiment.architecture.staging is None:
        return None
    waited = outcome.phases["wait"] + outcome.phases["exchange_exposed"]
    return waited / outcome.step_seconds


def _after_failures(
    experiment: spec.Experiment, step_seconds: float, failures: Failures | None
) -> tuple[float | None, int | None]:
    """The useful share of the time, and the steps between checkpoints."""
    if failures is None:
        return None, None
    hosts = sum(of.hosts for of in topology_of(experiment).classes)
    size_bytes = profile_for(experiment, experiment.cluster.device).parameter_bytes
    writing = checkpoint_seconds(size_bytes)
    every = failures.every or best_every(failures, hosts, step_seconds, writing)
    return useful_fraction(failures, hosts, step_seconds, writing), every


def _enough(points: Sequence[Point]) -> int:
    best = points[0]
    for point in points[1:]:
        if point.samples_per_second > best.samples_per_second * (1 + WORTH):
            best = point
    return best.workers
