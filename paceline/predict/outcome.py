"""What one simulation found, and what a device does in a step: shared by all ways to exchange."""

import math
from collections.abc import Callable
from statistics import NormalDist

import msgspec

from paceline import spec
from paceline.predict.devices import profile_for
from paceline.predict.stacks import DECODED_PER_SECOND, Constants
from paceline.predict.topology import HostClass, Topology
from paceline.spec.profile import DeviceProfile

MEMORY_BYTES_PER_SECOND = {
    "k80": 180e9,
    "gtx980": 170e9,
    "titanx": 250e9,
    "p100": 550e9,
    "v100": 700e9,
    "a100": 1200e9,
    "h200": 3500e9,
    "cpu": 8e9,
}
"""What a copy in device memory gets; about three quarters of the rate on paper."""

REAL_DATA = ("imagefolder",)
"""Data sets whose samples must be decoded."""


def rate_text(samples_per_second: float) -> str:
    """Four digits that count, and never a power of ten."""
    if samples_per_second >= 1000:
        return f"{samples_per_second:,.0f}"
    return f"{samples_per_second:.4g}"


class ClassStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the workers of one class of hosts."""

    workers: int
    step_seconds: float
    phases: dict[str, float]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a typical worker, and how long each resource is needed in it."""

    step_seconds: float
    samples_per_second: float
    phases: dict[str, float]
    """Seconds of a step by phase, as in a record."""

    needs: dict[str, float]
    """Resource -> seconds of each step that it is busy; the longest binds."""

    events: int = 0
    """Things that happened on the virtual clock: what the prediction cost."""

    paces: tuple[ClassStep, ...] = ()
    """For each class of hosts with workers, in order; none where all are alike."""

    worker_bytes: tuple[tuple[int, int], ...] = ()
    """Bytes that each worker sends and receives in a step, where the facts of the architecture do
    not say them."""


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker of one class computes in a step, layer by layer, and what that costs beside."""

    layers: tuple[tuple[float, float, int], ...]
    """Forward seconds, backward seconds, parameter bytes."""

    names: tuple[str, ...]
    update_seconds: float
    input_seconds: float
    samples: float

    @property
    def forward_seconds(self) -> float:
        return sum(layer[0] for layer in self.layers)

    @property
    def backward_seconds(self) -> float:
        return sum(layer[1] for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        return sum(layer[2] for layer in self.layers)

    @property
    def busy_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.update_seconds


def expected_max(count: float) -> float:
    """How many deviations the largest of `count` normal numbers lies above their mean (Blom)."""
    if count <= 1:
        return 0.0
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def work_of(
    experiment: spec.Experiment, of: HostClass, topology: Topology, constants: Constants
) -> WorkerLoad:
    """A worker's step on a host of this class, without anything it waits for."""
    profile: DeviceProfile = profile_for(experiment, of.device, constants.layer_overhead_seconds)
    workers = topology.workers
    batch = experiment.workload.global_batch_for(workers) / workers
    crowd = 1 + constants.crowd_fraction * (1 - 1 / of.workers)
    scale = profile.scale_for(max(1, round(batch))) * of.slowdown * crowd
    layers = tuple(
        (layer.forward_seconds * scale, layer.backward_seconds * scale, layer.parameter_bytes)
        for layer in profile.layers
    )
    busy = sum(forward + backward for forward, backward, _ in layers)
    memory = MEMORY_BYTES_PER_SECOND.get(of.device, 400e9)
    wrapping = constants.copy_passes * profile.parameter_bytes / memory
    wrapping += constants.tensor_seconds * len(layers)
    return WorkerLoad(
        layers=layers,
        names=tuple(layer.name for layer in profile.layers),
        update_seconds=wrapping if is_distributed(experiment) else 0.0,
        input_seconds=_input_seconds(experiment, of, batch, busy, constants),
        samples=batch,
    )


def is_distributed(experiment: spec.Experiment) -> bool:
    return not experiment.architecture.is_one_process


def _input_seconds(
    experiment: spec.Experiment, of: HostClass, batch: float, busy: float, constants: Constants
) -> float:
    """Real samples are decoded by cores that all devices of a host share.

    One device's own figure holds its own part already.
    """
    if experiment.workload.data not in REAL_DATA:
        return 0.0
    rate = of.workers * batch / busy
    share = constants.input_fraction * min(1.0, rate / DECODED_PER_SECOND)
    return busy * share * (1 - 1 / of.workers)


def slowest(experiment: spec.Experiment, topology: Topology, constants: Constants) -> WorkerLoad:
    """The class that everybody waits for where everybody waits."""
    works = [work_of(experiment, c, topology, constants) for c in topology.computing]
    return max(works, key=lambda work: work.busy_seconds)


def paces_of(
    experiment: spec.Experiment,
    topology: Topology,
    constants: Constants,
    step_of: Callable[[HostClass], float],
    *,
    together: bool,
) -> tuple[ClassStep, ...]:
    """What the workers of each class do in a step; where all wait for all, the quick ones wait."""
    if len(topology.computing) == 1:
        return ()
    works = [work_of(experiment, of, topology, constants) for of in topology.computing]
    longest = max(work.busy_seconds for work in works)
    paces = []
    for of, work in zip(topology.computing, works, strict=True):
        step = step_of(of)
        left = max(0.0, step - work.busy_seconds - work.input_seconds)
        wait = min(left, longest - work.busy_seconds) if together else 0.0
        phases = {
            "input": work.input_seconds,
            "forward": work.forward_seconds,
            "backward": work.backward_seconds,
            "exchange_exposed": left - wait,
            "update": work.update_seconds,
            "wait": wait,
        }
        paces.append(ClassStep(workers=of.hosts * of.workers, step_seconds=step, phases=phases))
    return tuple(paces)


def wait_seconds(
    work: WorkerLoad, layer_jitter_fraction: float, workers: int, constants: Constants
) -> float:
    """How much longer than the typical worker the slowest of `workers` takes.

    Jitter of single layers partly cancels in a pass.
    """
    squares = sum(forward**2 + backward**2 for forward, backward, _ in work.layers)
    of_layers = layer_jitter_fraction * math.sqrt(squares)
    of_steps = constants.jitter_fraction * work.busy_seconds
    return expected_max(workers) * math.hypot(of_layers, of_steps)
