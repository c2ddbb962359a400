"""A step of `pipeline`: the workers' own machines take their turns on a virtual clock.

A device profile says how long layers take, `units.json` where a built-in model may be cut and what
passes there. Stages are cut as the run cuts them, with the same function; a turn takes its stage's
time at the size of a micro-batch, and what it hands on travels one at a time over the link between
two workers. What the schedule costs is told apart from what handing on costs: by running the same
turns once more with links that take no time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline import spec
from paceline.errors import ExchangeError, SpecError
from paceline.predict.clock import Clock
from paceline.predict.collectives import all_reduce_seconds
from paceline.predict.devices import profile_for
from paceline.predict.model import SERVERS_ONLY, Model
from paceline.predict.outcome import ClassStep, Outcome, WorkerLoad, wait_seconds
from paceline.predict.stacks import Constants, Stack
from paceline.predict.timeline import Timeline
from paceline.predict.topology import HostClass, Topology, rate_of
from paceline.protocol.actions import Action
from paceline.protocol.pipeline import Came, Compute, Computed, Hand, Pipe, PipelineMachine, Turn
from paceline.spec.profile import DeviceProfile

UNITS = Path(__file__).with_name("units.json")
WHERE = "architecture pipeline"
ELEMENT_BYTES = 4
"""Activations travel in float32, whatever computes them."""

NOTICED = 0.03
"""Waiting for less of a step than this is not what limits."""


class ModelUnits(msgspec.Struct, frozen=True):
    input_shape: tuple[int, ...]
    units: tuple[tuple[str, int], ...]
    """Name, and how many numbers of a sample it hands on."""


@cache
def known_units() -> dict[str, ModelUnits]:
    return msgspec.json.decode(UNITS.read_bytes(), type=dict[str, ModelUnits])


class StageCost(NamedTuple):
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    handed_bytes: float
    """To the next stage, of one micro-batch; its gradient comes back."""

    def seconds(self, kind: str) -> float:
        return self.forward_seconds if kind == "forward" else self.backward_seconds


class Turns(NamedTuple):
    """One step's turns of all workers of a pipeline."""

    seconds: float
    busy: list[float]
    """Of each worker."""

    link_busy_seconds: float
    """Of the link that carries longest."""

    events: int

    @property
    def idle_fraction(self) -> float:
        return 1.0 - sum(self.busy) / (self.seconds * len(self.busy))


def run_turns(
    pipe: Pipe,
    seconds: Callable[[Turn], float],
    hand_seconds: Callable[[int, int, Turn], float] = lambda source, to, turn: 0.0,
    timeline: Timeline | None = None,
) -> Turns:
    """Let every worker's machine take its turns: how long a step is.

    `hand_seconds`: from one worker to another, what a turn needs; one at a time on each way.
    """
    clock = Clock()
    machines = [PipelineMachine(pipe, place) for place in range(pipe.workers)]
    busy, events = [0.0] * pipe.workers, 0
    free: dict[tuple[int, int], float] = {}
    carried: dict[tuple[int, int], float] = {}

    def act(place: int, actions: Sequence[Action]) -> None:
        nonlocal events
        for action in actions:
            events += 1
            match action:
                case Compute(turn):
                    taken = seconds(turn)
                    busy[place] += taken
                    _draw(timeline, place, turn, clock.now, taken)
                    clock.after(taken, partial(tell, place, Computed(turn)))
                case Hand(to, turn):
                    way, taken = (place, to), hand_seconds(place, to, turn)
                    start = max(clock.now, free.get(way, 0.0))
                    _draw(timeline, place, turn, start, taken, f"to worker{to}")
                    free[way] = start + taken
                    carried[way] = carried.get(way, 0.0) + taken
                    clock.at(free[way], partial(tell, to, Came(turn)))

    def tell(place: int, event: Came | Computed) -> None:
        act(place, machines[place].handle(event))

    for place, machine in enumerate(machines):
        act(place, machine.begin())
    clock.run()
    if not all(machine.is_over for machine in machines):
        raise ExchangeError("a pipeline stands still: its workers wait for each other.")
    return Turns(clock.now, busy, max(carried.values(), default=0.0), events)


def _draw(
    timeline: Timeline | None,
    place: int,
    turn: Turn,
    start: float,
    seconds: float,
    lane: str = "device",
) -> None:
    if timeline is not None:
        name = f"{turn.kind} of micro-batch {turn.microbatch}, stage {turn.stage}"
        timeline.add(f"worker{place}", lane, name, start, seconds)


def pipeline_step(
    experiment: spec.Experiment,
    topology: Topology,
    stack: Stack,
    constants: Constants,
    *,
    coarse: bool = False,
    timeline: Timeline | None = None,
) -> Outcome:
    """One step of all pipelines side by side, which are alike; it is as quick however coarse."""
    options = experiment.architecture.staging
    assert options is not None, "its architecture says how layers are split"
    pipe = Pipe.of(options, topology.workers)
    of = max(topology.computing, key=lambda c: c.slowdown)
    stages = stages_of(experiment, options, pipe, of, constants)

    def seconds(turn: Turn) -> float:
        return stages[turn.stage].seconds(turn.kind)

    ideal = run_turns(pipe, seconds)
    found = run_turns(pipe, seconds, _handing(stages, topology, constants), timeline)
    sums = _sum_seconds(pipe, stages, options.replicas, topology, stack, constants)
    if timeline is not None:
        for place in range(pipe.workers):
            name = f"sums with {options.replicas - 1} more pipelines"
            timeline.add(f"worker{place}", "sums", name, found.seconds, sums)
    loads = [_load(pipe, stages, place) for place in range(pipe.workers)]
    slowest = max(loads, key=lambda load: load.busy_seconds)
    late = wait_seconds(slowest, of.jitter_fraction, topology.workers, constants)
    phases = {
        "input": 0.0,
        "forward": sum(load.forward_seconds for load in loads) / pipe.workers,
        "backward": sum(load.backward_seconds for load in loads) / pipe.workers,
        "exchange_exposed": found.seconds - ideal.seconds + sums,
        "update": 0.0,
        "wait": ideal.seconds * ideal.idle_fraction + late,
    }
    step = sum(phases.values())
    needs = {
        "compute": slowest.busy_seconds,
        "links between stages": found.link_busy_seconds + sums,
    }
    for name, waited in (
        ("turns that wait for others", phases["wait"]),
        ("links between stages", phases["exchange_exposed"]),
    ):
        if waited > NOTICED * step:
            needs[name] = slowest.busy_seconds + waited
    return Outcome(
        step_seconds=step,
        samples_per_second=experiment.workload.global_batch_for(topology.workers) / step,
        phases=phases,
        needs=needs,
        events=ideal.events + found.events,
        paces=tuple(_pace(load, phases, step) for load in loads) * options.replicas,
        worker_bytes=_moved_bytes(options, pipe, stages),
    )


def _pace(load: WorkerLoad, phases: Mapping[str, float], step: float) -> ClassStep:
    """A worker's own part of a step: what its stages leave of it, it waits."""
    own = {**phases, "forward": load.forward_seconds, "backward": load.backward_seconds}
    own["wait"] = max(0.0, step - sum(own.values()) + own["wait"])
    return ClassStep(workers=1, step_seconds=step, phases=own)


def _moved_bytes(
    options: spec.Pipeline, pipe: Pipe, stages: Sequence[StageCost]
) -> tuple[tuple[int, int], ...]:
    """What each worker sends and receives in a step: activations one way, their gradients the
    other, and its part of the sums between pipelines."""
    summed = 2 * (options.replicas - 1) / options.replicas
    moved = [0.0] * pipe.workers
    """Each way: as much comes back as is handed on."""
    for number, stage in enumerate(stages):
        owner = pipe.owner(number)
        moved[owner] += summed * stage.parameter_bytes
        after = pipe.owner(number + 1) if number + 1 < pipe.stages else owner
        if owner != after:
            for place in (owner, after):
                moved[place] += pipe.microbatches * stage.handed_bytes
    return tuple((round(size), round(size)) for size in moved) * options.replicas


def stages_of(
    experiment: spec.Experiment,
    options: spec.Pipeline,
    pipe: Pipe,
    of: HostClass,
    constants: Constants,
) -> list[StageCost]:
    """Cut as the run cuts: the slowest stage as fast as can be."""
    from paceline.protocol.partition import UnitCost, cut, too_few  # it loads torch

    if options.memory_bytes is not None:
        problem = f"memory = {options.memory}: what a stage keeps is in no device profile."
        raise SpecError(WHERE, problem, "leave memory out of a prediction.")
    workload = experiment.workload
    profile = profile_for(experiment, of.device, constants.layer_overhead_seconds)
    batch = workload.global_batch_for(pipe.workers * options.replicas) / options.replicas
    part = batch / pipe.microbatches
    scale = profile.scale_for(max(1, round(part))) * of.slowdown
    units = _units(profile, scale, part)
    costs = [
        UnitCost(
            seconds=unit.forward_seconds + unit.backward_seconds,
            parameter_bytes=unit.parameter_bytes,
            activation_bytes=0,
        )
        for unit in units
    ]
    held = [0] * pipe.stages
    if pipe.stages > len(costs):
        raise too_few(len(costs), pipe.workers, pipe.loops, options.replicas)
    starts = cut(costs, pieces=pipe.stages, held=held, weight_factor=1.0, memory_bytes=None)
    ends = [*starts[1:], len(units)]
    return [_joined(units[a:b]) for a, b in zip(starts, ends, strict=True)]


def _units(profile: DeviceProfile, scale: float, samples: float) -> list[StageCost]:
    """The profile's layers gathered into units; one without a unit's name goes with the last."""
    known = known_units().get(profile.model)
    if known is None:
        problem = f"where {profile.model} may be cut, and what passes there, is not known."
        raise SpecError(WHERE, problem, f"choose one of {', '.join(known_units())}.")
    times = [[0.0, 0.0, 0.0] for _ in known.units]
    place = 0
    for layer in profile.layers:
        named = [n for n, (name, _) in enumerate(known.units) if _is_in(layer.name, name)]
        place = named[0] if named else place
        for index, value in enumerate(
            (layer.forward_seconds, layer.backward_seconds, layer.parameter_bytes)
        ):
            times[place][index] += value
    # Pictures of another size hand on in proportion; the last layers, which do not, hand on little.
    size = ELEMENT_BYTES * samples * math.prod(profile.input_shape) / math.prod(known.input_shape)
    return [
        StageCost(forward * scale, backward * scale, round(weight), handed * size)
        for (forward, backward, weight), (_, handed) in zip(times, known.units, strict=True)
    ]


def _is_in(layer: str, unit: str) -> bool:
    return layer == unit or layer.startswith(f"{unit}.")


def _joined(units: Sequence[StageCost]) -> StageCost:
    return StageCost(
        sum(unit.forward_seconds for unit in units),
        sum(unit.backward_seconds for unit in units),
        sum(unit.parameter_bytes for unit in units),
        units[-1].handed_bytes,
    )


def _handing(
    stages: Sequence[StageCost], topology: Topology, constants: Constants
) -> Callable[[int, int, Turn], float]:
    """Neighbours on one host hand on inside it, others over their cables."""
    each = max(c.workers for c in topology.computing)
    network = topology.network_rate(constants) if topology.computing_hosts > 1 else 0.0
    inside = rate_of(topology.inside, constants)

    def seconds(source: int, to: int, turn: Turn) -> float:
        edge = turn.stage - 1 if turn.kind == "forward" else turn.stage
        size = stages[edge].handed_bytes
        if source // each == to // each:
            return topology.inside.latency_seconds + size / inside
        return topology.latency_seconds + size / network

    return seconds


def _sum_seconds(
    pipe: Pipe,
    stages: Sequence[StageCost],
    replicas: int,
    topology: Topology,
    stack: Stack,
    constants: Constants,
) -> float:
    """Pipelines side by side average their gradients when the last turn is taken."""
    if replicas == 1:
        return 0.0
    largest = max(_load(pipe, stages, place).parameter_bytes for place in range(pipe.workers))
    of = topology.computing[0]
    on_one_host = topology.computing_hosts == 1
    peers = HostClass(
        name="peers",
        hosts=1 if on_one_host else replicas,
        workers=replicas if on_one_host else 1,
        servers=0,
        link=of.link,
        device=of.device,
    )
    among = Topology(classes=(peers,), inside=topology.inside, uplink=topology.uplink)
    return all_reduce_seconds(largest, among, constants, stack.algorithms)


def _load(pipe: Pipe, stages: Sequence[StageCost], place: int) -> WorkerLoad:
    """What a worker computes in a step."""
    own = [stage for number, stage in enumerate(stages) if pipe.owner(number) == place]
    times = pipe.microbatches
    return WorkerLoad(
        layers=tuple(
            (times * s.forward_seconds, times * s.backward_seconds, s.parameter_bytes) for s in own
        ),
        names=(),
        update_seconds=0.0,
        input_seconds=0.0,
        samples=0.0,
    )


PIPELINED = Model(step=pipeline_step, ignored=SERVERS_ONLY)
