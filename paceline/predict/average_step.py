"""A step of `average`: local steps, and rounds in which weights are averaged."""

from collections.abc import Mapping

from paceline import spec
from paceline.predict.collective_step import AllReduceCost, ExchangeCost, exchange_of, outcome_of
from paceline.predict.model import Model
from paceline.predict.outcome import Outcome, WorkerLoad, slowest
from paceline.predict.stacks import Constants, Stack
from paceline.predict.timeline import Timeline
from paceline.predict.topology import Topology
from paceline.protocol.actions import AllReduce
from paceline.protocol.collectives import (
    BESIDE,
    SHAPES,
    WEIGHTS,
    AverageMachine,
    LocalStepTaken,
    Reduced,
)

COUNT_BYTES = 8


def average_step(
    experiment: spec.Experiment,
    topology: Topology,
    stack: Stack,
    constants: Constants,
    *,
    coarse: bool = False,
    timeline: Timeline | None = None,
) -> Outcome:
    """The mean step of a round, the same for every worker."""
    kind, work = experiment.architecture.averaging, slowest(experiment, topology, constants)
    assert kind is not None, "its architecture says how it averages"
    exchange = exchange_of(experiment.architecture, topology, stack, constants)
    exposed = busy = 0.0
    if topology.workers > 1:
        optimizer = experiment.workload.optimizer
        sums = _sums_of_round(kind, optimizer, work, exchange, constants)
        compute = work.forward_seconds + work.backward_seconds
        exposed, busy = _between_rounds(kind, compute, sums), sum(sums.values()) / kind.every
    made = ExchangeCost(exposed, busy, exchange)
    apart = kind.every if topology.workers > 1 else 1
    return outcome_of(
        experiment, topology, constants, work, made, steps_between=apart, timeline=timeline
    )


def _sums_of_round(
    kind: spec.Average,
    optimizer: spec.Optimizer,
    work: WorkerLoad,
    exchange: AllReduceCost,
    constants: Constants,
) -> dict[int, float]:
    """Seconds of each sum of a round; a model's buffers are in no profile."""
    sizes = {WEIGHTS: work.parameter_bytes}
    if kind.state:
        sizes |= {SHAPES: COUNT_BYTES, BESIDE: optimizer.state_numbers * work.parameter_bytes}
    # A bucket is packed into one buffer, and out of it; one that is empty is not summed.
    return {
        bucket: exchange.seconds(size) + 2 * size / constants.sum_rate if size else 0.0
        for bucket, size in sizes.items()
    }


def _between_rounds(
    kind: spec.Average, compute_seconds: float, sum_seconds: Mapping[int, float]
) -> float:
    """Seconds that a local step waits for rounds, on average, once one is always under way."""
    machine = AverageMachine((0, 1), every=kind.every, overlap=kind.overlap, state=kind.state)
    now = there = began = 0.0
    summed = Reduced(0)
    for step in range(2 * kind.every):
        began = now if step == kind.every else began
        now += compute_seconds
        actions = machine.handle(LocalStepTaken())
        while True:
            for action in actions:
                if isinstance(action, AllReduce):
                    there = now + sum_seconds[action.bucket]
                    summed = Reduced(action.bucket, action.tag, 1)
            if not machine.waits:
                break
            now = max(now, there)
            actions = machine.handle(summed)
    return max(0.0, (now - began) / kind.every - compute_seconds)


AVERAGED = Model(step=average_step, ignored=frozenset({"message_seconds"}))
