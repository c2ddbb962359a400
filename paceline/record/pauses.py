"""Pauses, which belong to no step: those that a member named, and those that only show in its
times.

A worker that writes a checkpoint makes the others wait in their next exchange. That wait is the
checkpoint's, not a slow worker's. And a script that stops to log or to evaluate leaves a step in
ten with time outside all phases that the others do not have: that is a pause too.
"""

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from paceline.record.entries import Step

SCRIPT = "script"
"""A pause without a name, found by its length."""

NOTICED_SECONDS = 0.05
NOTICED_FRACTION = 0.5
"""Time outside all phases is a pause when it exceeds its median by both."""


def tell_pauses(steps: Mapping[str, Sequence[Step]]) -> dict[str, list[Step]]:
    """The same steps, without what was no part of them; call it on steps whose wait is told."""
    named = {name: _name_pauses(entries) for name, entries in steps.items()}
    longest: dict[int, dict[str, float]] = {}
    for entries in named.values():
        for entry in entries:
            if total(entry) > sum(longest.get(entry.step, {}).values()):
                longest[entry.step] = entry.paused_seconds
    return {
        name: [_without_wait(entry, longest.get(entry.step, {})) for entry in entries]
        for name, entries in named.items()
    }


def own_pauses(steps: Mapping[str, Sequence[Step]]) -> dict[str, dict[int, dict[str, float]]]:
    """Member -> step -> the pauses that it made itself; not what it waited for others'."""
    return {
        name: {step.step: step.paused_seconds for step in _name_pauses(entries)}
        for name, entries in steps.items()
    }


def total(entry: Step) -> float:
    """Seconds of all pauses before a step."""
    return sum(entry.paused_seconds.values())


def outside_seconds(entry: Step) -> float:
    """Time of a step that is in none of its phases."""
    return entry.seconds - sum(entry.breakdown_seconds.values())


def _name_pauses(entries: Sequence[Step]) -> list[Step]:
    """The first step is what it is: building graphs and buffers is no pause."""
    if len(entries) < 4:  # too few to tell what is usual
        return list(entries)
    usual = median(outside_seconds(entry) for entry in entries)
    least = max(NOTICED_SECONDS, NOTICED_FRACTION * median(entry.seconds for entry in entries))
    return [
        _paused(entry, {SCRIPT: extra})
        if (extra := outside_seconds(entry) - usual) > least and entry is not entries[0]
        else entry
        for entry in entries
    ]


def _without_wait(entry: Step, longest: Mapping[str, float]) -> Step:
    """Charge what this worker waited, because another one paused for longer, to that pause."""
    wait = entry.breakdown_seconds.get("wait", 0.0)
    whole = sum(longest.values())
    shared = min(wait, whole - total(entry))
    if shared <= 0:
        return entry
    parts = {what: seconds * shared / whole for what, seconds in longest.items()}
    breakdown = {**entry.breakdown_seconds, "wait": wait - shared}
    return _paused(msgspec.structs.replace(entry, breakdown_seconds=breakdown), parts)


def _paused(entry: Step, parts: Mapping[str, float]) -> Step:
    """The step shorter by the given pauses."""
    paused = dict(entry.paused_seconds)
    for what, seconds in parts.items():
        paused[what] = paused.get(what, 0.0) + seconds
    later = entry.start_seconds + sum(parts.values())
    return msgspec.structs.replace(entry, start_seconds=later, paused_seconds=paused)
