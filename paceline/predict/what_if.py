"""What a measured run would have given with something changed.

The run's own compute time takes the place of a profile's, so that both the run as it was and the
changed one are simulated on the same footing; the ratio of the two is the promise.
"""

import math
from statistics import fmean
from typing import Any

import msgspec

from paceline import record, spec
from paceline.errors import SpecError
from paceline.predict.answer import simulate
from paceline.predict.changes import vary
from paceline.predict.devices import networks
from paceline.predict.stacks import expected, find_stack, ranges
from paceline.record import RunFolder

DECIDING = ("tcp_fraction", "message_seconds", "sum_rate", "jitter_fraction")
"""Constants whose ranges make the range of a gain."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A gain, with its range."""

    measured: float
    """Samples per second of the run as it was."""

    expected: float
    low: float
    high: float
    limit: str
    """What would limit then."""

    @property
    def gain_fraction(self) -> float:
        return self.expected / self.measured - 1


def what_if(run: RunFolder, **changes: Any) -> WhatIf:
    """The run with fields of its experiment changed: `what_if(run, link="10gbit", servers=2)`.

    `slowdown=1.0` takes stragglers away. Raises SpecError where the run does not say enough about
    itself to be simulated.
    """
    rate = run.summary().samples_per_second
    if rate is None:
        raise SpecError(str(run.path), "the run has no throughput.", "run it for more steps.")
    before = as_measured(run)
    after = vary(before, **changes)
    stack = find_stack(before.prediction.stack)
    base, changed = simulate(before, stack), simulate(after, stack)
    ratio = changed.samples_per_second / base.samples_per_second
    above = below = stack.model_fraction**2
    for name in DECIDING:
        for value in (ranges(stack)[name][0], ranges(stack)[name][2]):
            constants = msgspec.structs.replace(expected(stack), **{name: value})
            pair = [simulate(e, stack, constants).samples_per_second for e in (before, after)]
            change = math.log(pair[1] / pair[0] / ratio)
            above += max(0.0, change) ** 2
            below += min(0.0, change) ** 2
    return WhatIf(
        measured=rate,
        expected=rate * ratio,
        low=rate * ratio * math.exp(-math.sqrt(below)),
        high=rate * ratio * math.exp(math.sqrt(above)),
        limit=max(changed.needs, key=lambda name: changed.needs[name]),
    )


def as_measured(run: RunFolder) -> spec.Experiment:
    """The run's experiment, resting on its own compute time and gradient bytes."""
    experiment, summary = run.experiment(), run.summary()
    phases = summary.breakdown_seconds
    if phases is None:
        raise SpecError(str(run.path), "the run has no breakdown.", "run it for more steps.")
    slowdowns = [h.slowdown for h in experiment.cluster.hosts for _ in range(h.count * h.workers)]
    compute = (phases.get("forward", 0.0) + phases.get("backward", 0.0)) / fmean(slowdowns or [1])
    workers = experiment.cluster.workers
    batch = max(1, experiment.workload.global_batch_for(workers) // workers)
    hosts = [msgspec.structs.replace(host, device="") for host in experiment.cluster.hosts]
    return spec.replace(
        experiment,
        engine="predict",
        device="measured",
        hosts=tuple(hosts),
        one_device=batch / compute,
        one_device_batch=batch,
        model_size=_model_size(experiment, summary),
    )


def _model_size(experiment: spec.Experiment, summary: record.Summary) -> str:
    """What all that serve hold together, where the model is not one of ours."""
    if experiment.workload.model in networks():
        return ""
    held = [member.counters.get("served_bytes") for member in summary.members]
    total = sum(size for size in held if isinstance(size, int))
    if not total:
        problem = f"the size of {experiment.workload.model} is not known."
        raise SpecError("what if", problem, "profile it with `paceline profile`.")
    return f"{total}B"
