"""Whether workers learn from what they should: from samples of their own, and of one kind.

Weights are the same on all of them, so what their losses differ by is their samples.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from paceline.explain.facts import Facts

SAME_FRACTION, SAME_STEPS = 0.9, 10
"""Workers whose losses are equal in this share of so many steps have seen the same samples."""

TURNS_FRACTION = 0.2
"""A loss over changing samples goes up and down, in this share of the steps at least."""

ODD_FRACTION = 0.8
"""Of the first steps, in which an odd worker's loss is the largest."""

ODD_FACTOR = 3.0
"""A worker whose loss is this many times any other's at the end has other data than they have."""

LEFT_BEHIND_FRACTION = 0.3
"""So has one whose loss has not fallen where all others' have, by this share: weights are the
same."""

SPIKE_FACTOR = 3.0
"""A loss this many times the first is thrown about, or was: it tells nothing of samples."""

LEARNT_FRACTION = 0.05
"""A loss that fell by less than this has not learnt; noise of a batch is about as large."""


JUMP_STEPS = 3
"""Losses before a jump that are averaged."""

LEARNT_BEFORE, NEW_AFTER = 0.5, 0.9
"""Of the first loss: less before a jump, as much after it. What comes is as new as at first."""

AS_LONG = 1 / 3
"""Of the steps in which the first samples were learnt, those after a jump take as many at least.
What is gone at once, where the first took long, was a bad batch."""

FEWEST_JUMPS = 3
"""Of four kinds of samples, one after the other, or two in turn."""


SORTED_BATCHES, SORTED_FRACTION = 8, 0.6
"""Batches whose labels were looked at, at least; classes in them, as a share of what shuffled
samples would hold, at most."""


def jumps(facts: Facts) -> list[tuple[int, float, float]]:
    """Where a loss that had fallen is suddenly as large as at first, again and again.

    So it is with samples that come sorted: each kind is learnt, and the next is new. Each jump is
    its step, and the loss before and after it. Empty where it is not so, or the rate changes.
    """
    if not all(map(math.isfinite, facts.losses.values())):
        return []
    steps, losses = list(facts.losses), list(facts.losses.values())
    if not losses or losses[0] <= 0:
        return []
    first, found = losses[0], []
    at_first, place = _learnt_in(losses, 0), JUMP_STEPS
    while place < len(losses):
        before, took = fmean(losses[place - JUMP_STEPS : place]), _learnt_in(losses, place)
        is_new = losses[place] > NEW_AFTER * first and took >= AS_LONG * at_first
        if before < LEARNT_BEFORE * first and is_new:
            found.append((steps[place], before, losses[place]))
            place += took
        place += 1
    if len(found) < FEWEST_JUMPS or any(_rate_rises(facts, step) for step, _, _ in found):
        return []
    return found


def sorted_labels(facts: Facts) -> tuple[float, float] | None:
    """Return the classes in a batch, and in one of shuffled samples; None where they are alike."""
    told = [member.counters.get("objective") for member in facts.members]
    for found in told:
        if isinstance(found, dict) and found.get("batches", 0) >= SORTED_BATCHES:
            own, usual = found.get("labels_per_batch", 0.0), found.get("labels_if_shuffled", 0.0)
            if usual >= 2 and own <= SORTED_FRACTION * usual:
                return own, usual
    return None


def _learnt_in(losses: Sequence[float], place: int) -> int:
    """After how many steps a loss is below what counts as learnt."""
    bound = LEARNT_BEFORE * losses[0]
    later = (n for n, loss in enumerate(losses[place:]) if loss < bound)
    return next(later, len(losses) - place)


def _rate_rises(facts: Facts, step: int) -> bool:
    """Shortly before this step."""
    before = [s.learning_rate or 0.0 for s in facts.typical.entries if 0 <= step - s.step <= 5]
    return bool(before) and max(before) > 1.01 * before[0]


def sees_the_same(facts: Facts) -> bool:
    """Whether a script's workers train on the same samples: then their losses are equal."""
    own = [losses for losses in facts.worker_losses.values() if losses]
    if facts.experiment.workload.script is None or not facts.together or len(own) < 2:
        return False
    steps = set.intersection(*map(set, own))
    moves = [b - a for a, b in pairwise(own[0][step] for step in sorted(steps))]
    turns = sum(a * b < 0 for a, b in pairwise(moves))
    if len(steps) < SAME_STEPS or turns < TURNS_FRACTION * len(steps):
        return False  # where samples are all alike, so are losses
    return fmean(len({losses[step] for losses in own}) == 1 for step in steps) >= SAME_FRACTION


def odd_worker(facts: Facts) -> tuple[str, float, float] | None:
    """The one worker whose loss is far above all others', its loss and the largest of theirs.

    Told by the first step, where all have the same weights and only their samples differ, if it
    stays so for a while; or by the second half of a run whose loss is not thrown about.
    """
    own = _own_losses(facts)
    fewest = min(map(len, own.values()), default=0)
    if len(own) < 2 or fewest < SAME_STEPS:
        return None
    firsts = [{name: losses[k] for name, losses in own.items()} for k in range(SAME_STEPS)]
    found = _odd(firsts[0])
    lasting = found is not None and fmean(max(f, key=f.__getitem__) == found[0] for f in firsts)
    if lasting and lasting >= ODD_FRACTION:
        return found
    settled = {name: median(losses[-(fewest // 2) :]) for name, losses in own.items()}
    if max(settled.values()) >= SPIKE_FACTOR * max(firsts[0].values()):
        return None
    behind = _left_behind(own)
    if behind:
        ends = {name: median(losses[-(fewest // 4) :]) for name, losses in own.items()}
        return behind, ends.pop(behind), max(ends.values())
    return _odd(settled)


def _own_losses(facts: Facts) -> dict[str, list[float]]:
    """Each worker's, where all train the same weights at once."""
    if not facts.together or facts.architecture.staging is not None:
        return {}
    return {
        name: [loss for loss in losses.values() if math.isfinite(loss)]
        for name, losses in facts.worker_losses.items()
    }


def _left_behind(own: dict[str, list[float]]) -> str:
    """The one worker whose loss has not fallen, where all others' have; empty if there is none."""
    quarter = min(map(len, own.values()), default=0) // 4
    if len(own) < 2 or quarter < SAME_STEPS:
        return ""
    fell = {
        name: 1 - median(losses[-quarter:]) / max(median(losses[:SAME_STEPS]), 1e-9)
        for name, losses in own.items()
    }
    least, *others = sorted(fell, key=lambda name: fell[name])
    alone = fell[least] < LEARNT_FRACTION and fell[others[0]] > LEFT_BEHIND_FRACTION
    return least if alone else ""


def is_left_behind(facts: Facts) -> bool:
    """Whether one worker learns nothing where all others do."""
    return bool(_left_behind(_own_losses(facts)))


def _odd(losses: dict[str, float]) -> tuple[str, float, float] | None:
    most = max(losses, key=lambda name: losses[name])
    next_most = max(loss for name, loss in losses.items() if name != most)
    if next_most > 0 and losses[most] > ODD_FACTOR * next_most:
        return most, losses[most], next_most
    return None
