"""Medians with intervals, without assuming a distribution. Numbers in, numbers out."""

from collections.abc import Sequence
from math import comb
from statistics import median

import msgspec

CONFIDENCE = 0.95


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A median and the interval that holds the true one."""

    median: float
    low: float
    high: float
    coverage: float
    """How sure the interval is. Few repeats cannot reach 95 %: three give 75 %."""

    jitter: float
    """Median distance from the median."""


def estimate(values: Sequence[float]) -> Estimate:
    """The median of `values` between two of them.

    Between the r-th smallest and the r-th largest of n values the true median lies with probability
    1 - 2 P(Binomial(n, 1/2) < r): exact for any distribution, and honest about small n.
    """
    ordered = sorted(values)
    rank = _rank(len(ordered))
    middle = median(ordered)
    return Estimate(
        median=middle,
        low=ordered[rank - 1],
        high=ordered[-rank],
        coverage=_coverage(len(ordered), rank),
        jitter=median(abs(value - middle) for value in ordered),
    )


def overlap(one: Estimate, other: Estimate) -> bool:
    """Whether the intervals leave it open which is larger."""
    return one.low <= other.high and other.low <= one.high


def _rank(count: int) -> int:
    """The narrowest interval that still reaches the confidence, else the widest there is."""
    best = 1
    for rank in range(2, count // 2 + 1):
        if _coverage(count, rank) >= CONFIDENCE:
            best = rank
    return best


def _coverage(count: int, rank: int) -> float:
    below: float = sum(comb(count, k) for k in range(rank)) / 2**count
    return max(0.0, 1 - 2 * below)
