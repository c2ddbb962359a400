"""Which phase of whose steps makes some steps longer than others."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

from paceline.record import Step
from paceline.record.pauses import outside_seconds

COMPUTE = ("forward", "backward", "update")
PARTS = ("input", "compute", "exchange_exposed", "wait", "outside")
"""Of a step, as far as they tell what makes it long: computing is one."""

OWN_PHASES = ("input", "compute", "outside")
"""What a worker does by itself; the others' waits only mirror it."""

Found = TypeVar("Found", bound=Any)
"""Something about a worker: its `phase`, and the `seconds` that cost."""


def worst(each: Sequence[Found | None]) -> Found | None:
    """What costs most of what was found of each worker, in its own work if anything is there."""
    found = [one for one in each if one is not None]
    own = [one for one in found if one.phase in OWN_PHASES]
    most = max(own or found, key=lambda one: one.seconds, default=None)
    if most is None:
        return None
    alike = sum(one.phase == most.phase for one in found)
    return replace(most, everybody=len(each) > 1 and alike == len(each))


def excess(slow: Sequence[Step], usual: Sequence[Step]) -> dict[str, float]:
    """By how much each part takes longer in slow steps."""
    return {
        part: fmean(part_of(s, part) for s in slow) - fmean(part_of(s, part) for s in usual)
        for part in PARTS
    }


def part_of(step: Step, part: str) -> float:
    if part == "outside":
        return outside_seconds(step)
    phases = COMPUTE if part == "compute" else (part,)
    return sum(step.breakdown_seconds.get(phase, 0.0) for phase in phases)
