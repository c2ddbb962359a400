"""The few constants of our own stack that a machine decides, found from a handful of its runs.

    found = calibrate([(experiment, samples_per_second), …])
    predict(experiment, found.stack())

Kept as a file with its date, beside the runs it came from (`paceline predict --calibrate RUN`);
every constant that is not fitted keeps its range.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from paceline import spec
from paceline.errors import RecordError, SpecError
from paceline.predict.answer import simulate
from paceline.predict.stacks import Constants, Range, Stack, expected, find_stack, ranges
from paceline.record import RunFolder

FILE = "calibration.json"
OWN = "paceline"
"""The stack that is calibrated."""

FITTED: dict[str, tuple[float, ...]] = {
    "tcp_fraction": (0.85, 0.88, 0.91, 0.93, 0.945, 0.956),
    "message_seconds": (10e-6, 20e-6, 40e-6, 80e-6, 160e-6, 320e-6),
    "sum_rate": (0.5e9, 1e9, 2e9, 4e9),
    "jitter_fraction": (0.001, 0.003, 0.01, 0.03),
}
"""Constant -> values that are tried."""

NOISE = 0.01
"""Of a measured rate: what two runs of the same experiment differ by."""

SLACK = 4.0
"""Ranges are of constants in general; those of one odd machine may lie so many times as far off."""

ROUNDS = 2
LEAST_MODEL_FRACTION = 0.03
SPREAD = 1.65
"""From a deviation to 90 %."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and how well it then fits the runs it was found from."""

    date: str
    constants: dict[str, float]
    errors: list[float]

    def stack(self) -> Stack:
        """Our stack with these constants, as uncertain as they fit badly."""
        own = find_stack(OWN)
        left = SPREAD * math.sqrt(sum(e * e for e in self.errors) / max(1, len(self.errors)))
        changes: dict[str, object] = {"model_fraction": max(LEAST_MODEL_FRACTION, left)}
        for name, value in self.constants.items():
            if name == "tcp_fraction":
                fractions = msgspec.structs.replace(own.link_fraction, tcp=_around(value, 0.01))
                changes["link_fraction"] = fractions
            else:
                changes[name] = _around(value, 0.3)
        return msgspec.structs.replace(own, **changes)


def _around(value: float, fraction: float) -> Range:
    return value * (1 - fraction), value, value * (1 + fraction)


def calibrate(known: Sequence[tuple[spec.Experiment, float]]) -> Calibration:
    """Try each constant's values in turn, and keep what brings the known runs nearest.

    Runs that do not depend on a constant leave it where it was expected.
    """
    stack = find_stack(OWN)
    fit, best = _Fit(stack, known), expected(stack)
    least = fit.badness(best)
    for _ in range(ROUNDS):
        for name, values in FITTED.items():
            for value in values:
                tried = msgspec.structs.replace(best, **{name: value})
                badness = fit.badness(tried)
                if badness < least:
                    best, least = tried, badness
    return Calibration(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        constants={name: getattr(best, name) for name in FITTED},
        errors=fit.errors(best),
    )


class _Fit:
    """How well constants explain measured runs.

    What a constant changes is a ratio of two coarse simulations, as in an interval.
    """

    def __init__(self, stack: Stack, known: Sequence[tuple[spec.Experiment, float]]) -> None:
        self._stack, self._experiments = stack, [experiment for experiment, _ in known]
        coarse = self._coarse(expected(stack))
        self._off = [
            simulate(experiment, stack).samples_per_second / measured / rate
            for (experiment, measured), rate in zip(known, coarse, strict=True)
        ]

    def _coarse(self, constants: Constants) -> list[float]:
        return [
            simulate(experiment, self._stack, constants, coarse=True).samples_per_second
            for experiment in self._experiments
        ]

    def errors(self, constants: Constants) -> list[float]:
        """Logarithms of predicted over measured."""
        rates = self._coarse(constants)
        return [math.log(off * rate) for off, rate in zip(self._off, rates, strict=True)]

    def badness(self, constants: Constants) -> float:
        """Squared errors in units of noise, and how far constants are from what was expected."""
        fit = sum((error / NOISE) ** 2 for error in self.errors(constants))
        known = ranges(self._stack)
        return fit + sum(_surprise(known[n], getattr(constants, n)) ** 2 for n in FITTED)


def _surprise(range_: Range, value: float) -> float:
    """How far from expected: one at as many deviations as `SLACK` says, its range being 90 %."""
    low, middle, high = range_
    end = high if value > middle else low
    return SPREAD * math.log(value / middle) / math.log(end / middle) / SLACK


def from_runs(runs: Sequence[RunFolder]) -> Calibration:
    """From measured runs of this project's own software."""
    known = []
    for run in runs:
        experiment, rate = run.experiment(), run.summary().samples_per_second
        if experiment.engine == "predict" or rate is None:
            problem = "it was not measured: nothing can be learned from it."
            fix = "name a run of `here` or `tunnel` that finished."
            raise SpecError(str(run.path), problem, fix)
        known.append((spec.replace(experiment, engine="predict"), rate))
    return calibrate(known)


def kept(runs: Path) -> Calibration | None:
    """What was found from runs in this folder, if anything was."""
    path = runs / FILE
    return load(path) if path.is_file() else None


def stack_for(experiment: spec.Experiment, runs: Path) -> tuple[Stack, str]:
    """The software of an experiment, with the constants of this machine where they are known, and
    the date they are from, or nothing."""
    found = kept(runs) if experiment.prediction.stack == OWN else None
    if found is None:
        return find_stack(experiment.prediction.stack), ""
    return found.stack(), found.date


def save(found: Calibration, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def load(path: Path) -> Calibration:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except msgspec.MsgspecError as error:
        fix = "remove it, or write it anew with `paceline predict --calibrate RUN`."
        raise RecordError(f"{path} is not a calibration: {error}.\n  fix: {fix}") from None
