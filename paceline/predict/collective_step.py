"""A step by collectives: `single`, `ring`, and `hybrid` with a ring between hosts.

All workers do the same at the same time, so one machine stands for all, and what it wants summed
takes as long as a closed form says: 100,000 workers cost what two do.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from paceline import spec
from paceline.predict.collectives import all_reduce_seconds, host_sum_seconds
from paceline.predict.model import SERVERS_ONLY, Model
from paceline.predict.outcome import Outcome, WorkerLoad, paces_of, slowest, wait_seconds
from paceline.predict.stacks import Constants, Stack
from paceline.predict.timeline import Timeline
from paceline.predict.topology import HostClass, Topology
from paceline.protocol.actions import AllReduce
from paceline.protocol.buckets import HYBRID_BUCKET_BYTES, filled
from paceline.protocol.collectives import Made, RingMachine
from paceline.units import format_bytes

PHASES = 5
NOTICED = 0.03
"""Waiting for less of a step than this is not what limits."""


def collective_step(
    experiment: spec.Experiment,
    topology: Topology,
    stack: Stack,
    constants: Constants,
    *,
    coarse: bool = False,
    timeline: Timeline | None = None,
) -> Outcome:
    """One step, the same for every worker; it is as quick however coarse."""
    kind, work = experiment.architecture, slowest(experiment, topology, constants)
    exchange = exchange_of(kind, topology, stack, constants)
    exposed = busy = 0.0
    if topology.workers > 1:
        exposed, busy = _exposed(work, exchange, stack, kind, constants)
    made = ExchangeCost(exposed, busy, exchange)
    return outcome_of(experiment, topology, constants, work, made, timeline=timeline)


class ExchangeCost(NamedTuple):
    """What the exchange of one step costs."""

    exposed_seconds: float
    busy_seconds: float
    """How long links are busy with it, hidden or not."""

    exchange: "AllReduceCost"


def outcome_of(
    experiment: spec.Experiment,
    topology: Topology,
    constants: Constants,
    work: WorkerLoad,
    exchanged: ExchangeCost,
    *,
    steps_between: int = 1,
    timeline: Timeline | None = None,
) -> Outcome:
    """A step of workers that wait for each other every `steps_between` steps."""
    jitter = max(c.jitter_fraction for c in topology.computing)
    late = wait_seconds(work, jitter, topology.workers, constants) / steps_between**0.5
    phases = {
        "input": work.input_seconds,
        "forward": work.forward_seconds,
        "backward": work.backward_seconds,
        "exchange_exposed": exchanged.exposed_seconds,
        "update": work.update_seconds,
        "wait": late if topology.workers > 1 else 0.0,
    }
    step = sum(phases.values())
    if timeline is not None:
        _draw(timeline, phases, exchanged.exchange)
    needs = {
        "compute": work.busy_seconds,
        exchanged.exchange.limit: exchanged.busy_seconds,
        "input": work.input_seconds,
    }
    if phases["wait"] > NOTICED * step:
        needs["the slowest worker"] = work.busy_seconds + phases["wait"]
    return Outcome(
        step_seconds=step,
        samples_per_second=_samples(experiment, topology) / step,
        phases=phases,
        needs=needs,
        events=len(work.layers),
        paces=paces_of(experiment, topology, constants, lambda _: step, together=True),
    )


class AllReduceCost:
    """How long one bucket takes, and what carries it."""

    def __init__(
        self, topology: Topology, algorithms: Sequence[str], constants: Constants, in_host: bool
    ) -> None:
        self._constants, self._algorithms = constants, algorithms
        self._inside = topology if in_host else None
        self._between = _leaders(topology) if in_host else topology
        self.limit = "links between hosts" if topology.computing_hosts > 1 else "links in the host"
        self.sent: list[tuple[float, float, float]] = []
        """Of the last pass: bytes, since backward began, seconds."""

    def begin(self, size_bytes: float, at: float) -> float:
        """Send a bucket; returns how long it takes."""
        seconds = self.seconds(size_bytes)
        self.sent.append((size_bytes, at, seconds))
        return seconds

    def seconds(self, size_bytes: float) -> float:
        inside = 0.0
        if self._inside is not None:
            inside = host_sum_seconds(size_bytes, self._inside, self._constants)
        between = all_reduce_seconds(size_bytes, self._between, self._constants, self._algorithms)
        return inside + between


def exchange_of(
    kind: spec.Architecture, topology: Topology, stack: Stack, constants: Constants
) -> AllReduceCost:
    return AllReduceCost(topology, stack.algorithms, constants, kind.sums_in_host)


def _draw(timeline: Timeline, phases: dict[str, float], exchange: AllReduceCost) -> None:
    """A typical worker's step: its phases one after the other, and the buckets beside them."""
    at = 0.0
    for name, seconds in phases.items():
        timeline.add("a worker", "device", name.replace("_", " "), at, seconds)
        at += seconds
    backward_at = phases["input"] + phases["forward"]
    for size_bytes, since, seconds in exchange.sent:
        name = f"all-reduce, {format_bytes(size_bytes)}"
        timeline.add("a worker", exchange.limit, name, backward_at + since, seconds)


def _leaders(topology: Topology) -> Topology:
    """One worker per host."""
    classes = tuple(
        HostClass(name=c.name, hosts=c.hosts, workers=1, servers=0, link=c.link, device=c.device)
        for c in topology.computing
    )
    return Topology(classes=classes, inside=topology.inside, uplink=topology.uplink)


def _exposed(
    work: WorkerLoad,
    exchange: AllReduceCost,
    stack: Stack,
    kind: spec.Architecture,
    constants: Constants,
) -> tuple[float, float]:
    """Seconds of the exchange after backward, and seconds the links are busy in all.

    Buckets leave one after the other, each when its last gradient is there; with cycles, all that
    is ready leaves at the next one.
    """
    made = made_in(work)
    if constants.cycle_seconds:
        size = _bucket_bytes(kind, stack)[1]
        end, busy = _in_cycles(made, exchange, constants.cycle_seconds, size)
    else:
        end, busy = _in_order(made, list(buckets(made, kind, stack)), exchange)
    lost = constants.contention_fraction * min(busy, work.backward_seconds)
    return max(0.0, end - work.backward_seconds) + lost, busy


def _in_order(
    made: Sequence[tuple[float, int]], cut: Sequence[tuple[int, int]], exchange: AllReduceCost
) -> tuple[float, float]:
    """Buckets leave when the machine lets them; the library sums one after the other."""
    machine, end, busy = RingMachine((0,), len(cut)), 0.0, 0.0
    for bucket, (layer, _) in enumerate(cut):
        for action in machine.handle(Made(bucket)):
            assert isinstance(action, AllReduce)
            seconds = exchange.begin(cut[action.bucket][1], begin := max(end, made[layer][0]))
            end, busy = begin + seconds, busy + seconds
    return end, busy


def made_in(work: WorkerLoad) -> list[tuple[float, int]]:
    """For each layer, the last first: when backward has made its gradients, and their bytes."""
    made: list[tuple[float, int]] = []
    at = 0.0
    for _, backward, size_bytes in reversed(work.layers):
        at += backward
        made.append((at, size_bytes))
    return made


def buckets(
    made: Sequence[tuple[float, int]], kind: spec.Architecture, stack: Stack
) -> Iterator[tuple[int, int]]:
    """For each bucket its last layer, as `made` counts them, and its bytes."""
    first, size = _bucket_bytes(kind, stack)
    for bucket in filled([(size_bytes, None) for _, size_bytes in made], first, size):
        if size_bytes := sum(made[layer][1] for layer in bucket):
            yield bucket[-1], size_bytes


def _bucket_bytes(kind: spec.Architecture, stack: Stack) -> tuple[int, int]:
    """At how many bytes the first bucket leaves, and any other."""
    size = kind.piece_bytes or (HYBRID_BUCKET_BYTES if kind.sums_in_host else stack.bucket_bytes)
    return min(stack.first_bucket_bytes, size), size


def _in_cycles(
    made: Sequence[tuple[float, int]], exchange: AllReduceCost, cycle: float, size: int
) -> tuple[float, float]:
    """One thread looks every cycle at what is ready, fuses up to `size`, and sees it through.

    Cycles do not know when a step begins: the mean over where in one it does.
    """
    found = [_from_phase(made, exchange, cycle, size, k / PHASES) for k in range(PHASES)]
    return fmean(end for end, _ in found), fmean(busy for _, busy in found)


def _from_phase(
    made: Sequence[tuple[float, int]],
    exchange: AllReduceCost,
    cycle: float,
    size: int,
    phase: float,
) -> tuple[float, float]:
    now, busy, last = 0.0, 0.0, -phase * cycle
    exchange.sent = []
    waiting = deque(made)
    while waiting:
        idle = max(0.0, waiting[0][0] - max(now, last + cycle))
        now = last = max(now, last + cycle) + cycle * math.ceil(idle / cycle)
        fused = 0
        while waiting and waiting[0][0] <= now and (not fused or fused + waiting[0][1] <= size):
            fused += waiting.popleft()[1]
        seconds = exchange.begin(fused, now)
        now, busy = now + seconds, busy + seconds
    return now, busy


def _samples(experiment: spec.Experiment, topology: Topology) -> float:
    return float(experiment.workload.global_batch_for(topology.workers))


SYNCHRONOUS = Model(step=collective_step, ignored=SERVERS_ONLY)
"""`single`, `ring`, and `hybrid` with a ring between hosts."""
