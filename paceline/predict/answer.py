"""From an experiment to a prediction with an interval.

Every uncertain constant is tried at both ends of its range; what each end changes is added up as
independent errors are. So an interval says what is not known about this cluster, and is wide where
a constant nobody knows decides. What a constant changes is a ratio of two coarser simulations: that
takes a fifth of the time, and ratios bear coarseness well.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import product

import msgspec

from paceline import spec
from paceline.errors import SpecError
from paceline.predict.codecs import CODECS, codec_of
from paceline.predict.model import model_of
from paceline.predict.outcome import REAL_DATA, Outcome
from paceline.predict.stacks import Constants, Stack, expected, find_stack, ranges
from paceline.predict.timeline import Timeline
from paceline.predict.topology import topology_of

CHANCE = 0.002
"""Less than this may be chance where workers drift apart, and would add up over the constants."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """An outcome, and between which figures the truth is expected to lie nine times in ten."""

    outcome: Outcome
    low: float
    high: float
    """Samples per second."""

    limit: str
    """What binds: the resource that is needed longest in a step."""

    @property
    def samples_per_second(self) -> float:
        return self.outcome.samples_per_second


def simulate(
    experiment: spec.Experiment,
    stack: Stack | None = None,
    constants: Constants | None = None,
    *,
    coarse: bool = False,
    timeline: Timeline | None = None,
) -> Outcome:
    """One simulation; constants at their expected values unless given.

    `coarse`: with fewer groups of workers and fewer steps, for ratios. `timeline` is told what
    happens when.
    """
    stack = stack or find_stack(experiment.prediction.stack)
    constants = constants or expected(stack)
    topology = topology_of(experiment)
    if len(set(experiment.cluster.shares)) > 1:
        problem = "uneven shares of a batch cannot be predicted yet."
        raise SpecError("[cluster], shares", problem, "leave them out: every worker has the same.")
    step = model_of(experiment.architecture).step
    return step(experiment, topology, stack, constants, coarse=coarse, timeline=timeline)


def predict(
    experiment: spec.Experiment, stack: Stack | None = None, known: Collection[str] = ()
) -> Predicted:
    """The expected figures of `experiment`, with their interval.

    `known`: constants that are not in doubt, because something they multiply was fitted.
    """
    stack = stack or find_stack(experiment.prediction.stack)
    devices = {experiment.cluster.device, *(host.device for host in experiment.cluster.hosts)}
    if any(device.endswith(".json") for device in devices):  # a file may have changed
        return _predict(experiment, stack, known)
    # A comparison asks the same of every repetition, and an engine's check before its run.
    nameless = msgspec.structs.replace(experiment, name="")
    asked = msgspec.json.encode((nameless, stack, sorted(known)))
    if asked not in _recent:
        if len(_recent) >= MOST_RECENT:
            _recent.pop(next(iter(_recent)))
        _recent[asked] = _predict(experiment, stack, known)
    return _recent[asked]


MOST_RECENT = 512
_recent: dict[bytes, Predicted] = {}
"""What was asked -> the answer, the newest last."""


def _predict(experiment: spec.Experiment, stack: Stack, known: Collection[str]) -> Predicted:
    middle = simulate(experiment, stack)
    best = middle.samples_per_second
    waited = middle.phases["exchange_exposed"] / middle.step_seconds
    above = below = stack.model_fraction**2 + (stack.exposed_fraction * waited) ** 2
    for change in _changes(experiment, stack, known):
        above += change**2 if change > 0 else 0.0
        below += change**2 if change < 0 else 0.0
    return Predicted(
        outcome=middle,
        low=best * math.exp(-math.sqrt(below)),
        high=best * math.exp(math.sqrt(above)),
        limit=max(middle.needs, key=lambda name: middle.needs[name]),
    )


QUICKER_WHEN_LARGER = {
    *("tcp_fraction", "rdma_fraction", "bus_fraction"),
    *("process_rate", "sum_rate", "codec_speed"),
}
"""Constants that are rates. All others are costs: the larger one is, the longer a step takes."""

OF_COMPUTING = {
    *("crowd_fraction", "input_fraction", "layer_overhead_seconds"),
    *("copy_passes", "tensor_seconds"),
}
"""Constants of a worker's own step; `jitter_fraction` changes nearly every prediction."""


def _changes(experiment: spec.Experiment, stack: Stack, known: Collection[str]) -> Iterator[float]:
    """What each end of each constant's range changes, as the logarithm of a ratio of speeds.

    Often computing hides all that is in doubt about an exchange. So the slow ends of its constants
    are tried together first, then the quick ones: if they change nothing together, no single one
    does.
    """
    middle = expected(stack)
    base = simulate(experiment, stack, coarse=True).samples_per_second
    doubted = [
        (name, end)
        for name, (low, _, high) in ranges(stack).items()
        if name not in known and _matters(name, experiment)
        for end in (low, high)
        if end != getattr(middle, name)
    ]

    def change(ends: Sequence[tuple[str, float]]) -> float:
        changed = msgspec.structs.replace(middle, **dict(ends))
        found = math.log(
            simulate(experiment, stack, changed, coarse=True).samples_per_second / base
        )
        return found if abs(found) >= CHANCE else 0.0

    own = [pair for pair in doubted if pair[0] in OF_COMPUTING]
    jitter = [pair for pair in doubted if pair[0] == "jitter_fraction"]
    of_exchange = [pair for pair in doubted if pair not in own and pair not in jitter]
    yield from (change([one]) for one in jitter)
    for some, quicker in product((own, of_exchange), (False, True)):
        ends = [
            (name, end)
            for name, end in some
            if ((end > getattr(middle, name)) == (name in QUICKER_WHEN_LARGER)) == quicker
        ]
        if len(ends) == 1 or (ends and change(ends)):
            yield from (change([one]) for one in ends)


SMALL = {"copy_passes", "tensor_seconds", "collision_fraction"}
"""What these change is less than what workers that drift apart change by chance."""


def _matters(name: str, experiment: spec.Experiment) -> bool:
    """Whether a constant can change this prediction at all; each that can costs two simulations."""
    kind, workload = experiment.architecture, experiment.workload
    if name in model_of(kind).ignored:
        return False
    if name in SMALL:
        return kind.waits_for_all
    if name == "codec_speed":
        return codec_of(kind) != CODECS["none"]
    if name == "input_fraction":
        return workload.data in REAL_DATA
    if name == "jitter_fraction":
        return kind.waits_for_all
    if name == "layer_overhead_seconds":
        known = experiment.prediction
        return bool(known.one_device and known.one_device_batch not in (0, workload.batch))
    if name in ("tcp_fraction", "rdma_fraction", "bus_fraction"):
        topology = topology_of(experiment)
        links = [topology.inside, *(c.link for c in topology.classes)]
        return name.removesuffix("_fraction") in {link.kind for link in links}
    return True
