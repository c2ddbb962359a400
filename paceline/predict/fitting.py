"""What a cluster's own figures say about it: one unknown rate, found so that a known run comes out.

A published figure for few devices, or a measured run, fixes what nobody wrote down: the speed of
one device, the rate of a cable, what joins the devices of a host.
"""

import math
from collections.abc import Callable
from typing import Literal

from paceline import spec
from paceline.predict.answer import simulate

Unknown = Literal["one_device", "link", "inside"]
DEVICE_TOLERANCE, RATE_TOLERANCE = 1e-3, 5e-3
"""Where workers drift apart, chance moves a throughput by more than a thousandth."""

LEAST, GUESS, MOST = 1e7, 1e10, 2e12
"""Bits per second between which a rate is looked for, and where first."""

MOST_GUESSES = 20


def fit(known: spec.Experiment, samples_per_second: float, unknown: Unknown) -> spec.Experiment:
    """`known` with the unknown put so that it is predicted to give `samples_per_second`."""
    if unknown == "one_device":
        return _fit_device(known, samples_per_second)
    kind = spec.parse_link(getattr(known.cluster, unknown) or "10gbit", unknown)
    suffix = f",{kind.latency_seconds:g}s"

    def at(rate: float) -> spec.Experiment:
        return spec.replace(known, **{unknown: f"{rate:.6g}bit{suffix}"})

    return at(_solve(lambda rate: simulate(at(rate)).samples_per_second, samples_per_second))


def _fit_device(known: spec.Experiment, samples_per_second: float) -> spec.Experiment:
    fitted = spec.replace(known, one_device=samples_per_second / known.cluster.workers)
    for _ in range(8):
        ratio = samples_per_second / simulate(fitted).samples_per_second
        if abs(ratio - 1) < DEVICE_TOLERANCE:
            break
        fitted = spec.replace(fitted, one_device=fitted.prediction.one_device * ratio)
    return fitted


def _solve(predicted: Callable[[float], float], wanted: float) -> float:
    """The rate at which a throughput that grows with it is as wanted; the nearest end otherwise.

    In logarithms, by what the last two guesses say of the slope, inside what is still possible.
    """
    low, high, guess = math.log(LEAST), math.log(MOST), math.log(GUESS)
    before: tuple[float, float] | None = None
    for _ in range(MOST_GUESSES):
        lack = math.log(wanted / predicted(math.exp(guess)))
        if abs(lack) < RATE_TOLERANCE:
            break
        low, high = (guess, high) if lack > 0 else (low, guess)
        slope = 1.0  # where the rate decides, throughput is proportional to it
        if before is not None and before[0] != guess:
            slope = (before[1] - lack) / (guess - before[0])
        before = guess, lack
        guess += lack / slope if slope > 0 else 0.0
        if not low < guess < high:
            guess = (low + high) / 2
    return math.exp(guess)
