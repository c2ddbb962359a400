"""A run that was started again, read as one: steps that were undone are left out.

After a loss all members start again from a checkpoint and append to their files. The steps between
the checkpoint and the loss are there twice: the second time counts. What came between, from the end
of the last step that counts to the start of the next, is a pause with a name.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from paceline.record.entries import Step

RESTART = "restart"
"""The kind of event that begins a life."""

RECOVERY = "recovery"
"""The pause: steps that were lost, the loss itself, and the start."""


def split(entries: Sequence[Step], restarts: Sequence[float]) -> list[list[Step]]:
    """The steps of each life; `restarts` are the moments at which one began."""
    bounds = [float("-inf"), *sorted(restarts), float("inf")]
    return [
        [entry for entry in entries if begin <= entry.start_seconds < end]
        for begin, end in pairwise(bounds)
    ]


def joined(entries: Sequence[Step], restarts: Sequence[float]) -> list[Step]:
    """The steps that count, in order."""
    return _told_apart(entries, restarts)[0]


def undone(entries: Sequence[Step], restarts: Sequence[float]) -> list[Step]:
    """The steps that were done and lost."""
    return _told_apart(entries, restarts)[1]


def _told_apart(
    entries: Sequence[Step], restarts: Sequence[float]
) -> tuple[list[Step], list[Step]]:
    kept: list[Step] = []
    lost: list[Step] = []
    for life in filter(None, split(entries, restarts)):
        first = life[0]
        lost += [entry for entry in kept if entry.step >= first.step]
        kept = [entry for entry in kept if entry.step < first.step]
        if kept:
            gap = first.start_seconds - sum(first.paused_seconds.values()) - kept[-1].end_seconds
            pauses = {RECOVERY: max(0.0, gap), **first.paused_seconds}
            first = msgspec.structs.replace(first, paused_seconds=pauses)
        kept += [first, *life[1:]]
    return kept, lost
