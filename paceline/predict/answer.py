"""From an experiment to a prediction with an interval.

Every uncertain constant is tried at both ends of its range; what each end changes is added up as
independent errors are. So an interval says what is not known about this cluster, and is wide where
a constant nobody knows decides. What a constant changes is a ratio of two coarser simulations: that
takes a fifth of the time, and ratios bear coarseness well.
"""

import math
from collections.abc import Collection

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
    middle = simulate(experiment, stack)
    best = middle.samples_per_second
    base = simulate(experiment, stack, coarse=True).samples_per_second
    waited = middle.phases["exchange_exposed"] / middle.step_seconds
    above = below = stack.model_fraction**2 + (stack.exposed_fraction * waited) ** 2
    for name, (low, _, high) in ranges(stack).items():
        if name in known or not _matters(name, experiment):
            continue
        for value in (low, high):
            changed = msgspec.structs.replace(expected(stack), **{name: value})
            if changed == expected(stack):
                continue
            found = simulate(experiment, stack, changed, coarse=True).samples_per_second
            change = math.log(found / base)
            if abs(change) < CHANCE:
                continue
            above += change**2 if change > 0 else 0.0
            below += change**2 if change < 0 else 0.0
    return Predicted(
        outcome=middle,
        low=best * math.exp(-math.sqrt(below)),
        high=best * math.exp(math.sqrt(above)),
        limit=max(middle.needs, key=lambda name: middle.needs[name]),
    )


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
