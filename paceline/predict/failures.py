"""What failures leave of a cluster's work: hosts that break, checkpoints, restarts.

    useful_fraction(failures, hosts=64, step_seconds=0.3, checkpoint_seconds=0.5)

Hosts break independently of each other, at times that do not depend on how long they have run. A
job that loses one goes back to its last checkpoint, after `restart_seconds`. Between two
checkpoints lie `every` steps; without a number, as many as Daly's closed form finds best.
"""

import math

import msgspec

DISK_BYTES_PER_SECOND = 500e6
"""What a checkpoint is written at where nobody says."""

STATE_COPIES = 2
"""A checkpoint holds the weights and the optimizer's momentum."""


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """How often hosts break, and what is done about it."""

    mtbf_seconds: float
    """Mean time between failures of one host."""

    every: int = 0
    """Steps between checkpoints; 0: the best number."""

    restart_seconds: float = 60.0


def checkpoint_seconds(parameter_bytes: float) -> float:
    return STATE_COPIES * parameter_bytes / DISK_BYTES_PER_SECOND


def best_every(
    failures: Failures, hosts: int, step_seconds: float, checkpoint_seconds: float
) -> int:
    """Steps between checkpoints that lose least (Daly 2006, the first two terms)."""
    between = failures.mtbf_seconds / hosts
    if checkpoint_seconds >= 2 * between:
        return max(1, round(between / step_seconds))
    ratio = checkpoint_seconds / (2 * between)
    root = math.sqrt(2 * checkpoint_seconds * between)
    seconds = root * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_seconds
    return max(1, round(seconds / step_seconds))


def useful_fraction(
    failures: Failures, hosts: int, step_seconds: float, checkpoint_seconds: float
) -> float:
    """Of an hour, the share in which steps are made that stay."""
    every = failures.every or best_every(failures, hosts, step_seconds, checkpoint_seconds)
    between = failures.mtbf_seconds / hosts
    work = every * step_seconds
    exponent = (work + checkpoint_seconds) / between
    if exponent + failures.restart_seconds / between > 500:
        return 0.0  # never comes to its next checkpoint
    restarts = math.exp(failures.restart_seconds / between)
    return work / (between * restarts * math.expm1(exponent))
