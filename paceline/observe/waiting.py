"""Waiting for a late rank, told apart from transfer, in every collective of a step.

A member that is blocked in a collective waits for the last one to arrive, and from then on for the
transfer. A rank that comes late to one collective after another is late by the sum: between two of
them all ranks start together.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from paceline.observe.clocks import Key, by_key
from paceline.record import CollectiveCall, Step

FROM_ONE = ("broadcast", "scatter", "_broadcast_oop")
"""Collectives in which members wait for the first of the group alone."""


def tell_waiting(
    steps: Mapping[str, Sequence[Step]],
    collectives: Mapping[str, Sequence[CollectiveCall]],
    offsets: Mapping[str, float],
) -> dict[str, list[Step]]:
    """The same steps with `wait` told from `exchange_exposed`, and with `ready_seconds` that say
    how late each rank was in all. Told again, they stay as they are."""
    known = {name: by_key(collectives.get(name, ())) for name in steps}
    arrivals = _arrivals(known, offsets)
    first = next(iter(steps), "")
    found = {}
    for name, entries in steps.items():
        inside = _by_step(entries, known[name])
        found[name] = [
            _told(entry, inside.get(entry.step, []), name, first, arrivals, offsets)
            for entry in entries
        ]
    return _with_ready(found, known, arrivals, offsets)


def _arrivals(
    known: Mapping[str, Mapping[Key, CollectiveCall]], offsets: Mapping[str, float]
) -> dict[Key, dict[str, float]]:
    """Collective -> member -> when it came, on the reference's clock; of two members or more."""
    found: dict[Key, dict[str, float]] = {}
    for name, entries in known.items():
        if name in offsets:
            for key, entry in entries.items():
                came = entry.blocked_seconds or entry.arrived_seconds
                found.setdefault(key, {})[name] = came + offsets[name]
    return {key: came for key, came in found.items() if len(came) > 1}


def _by_step(
    steps: Sequence[Step], known: Mapping[Key, CollectiveCall]
) -> dict[int, list[tuple[Key, CollectiveCall]]]:
    """Step -> the collectives in it for which the member was blocked, in order."""
    starts = [step.start_seconds for step in steps]
    found: dict[int, list[tuple[Key, CollectiveCall]]] = {}
    for key, entry in known.items():
        if entry.blocked_seconds is None or entry.ended_seconds is None:
            continue
        place = bisect_right(starts, entry.blocked_seconds) - 1
        if place >= 0 and entry.blocked_seconds <= steps[place].end_seconds:
            found.setdefault(steps[place].step, []).append((key, entry))
    return found


def _told(
    step: Step,
    inside: Sequence[tuple[Key, CollectiveCall]],
    name: str,
    first: str,
    arrivals: Mapping[Key, Mapping[str, float]],
    offsets: Mapping[str, float],
) -> Step:
    parts = dict(step.breakdown_seconds)
    exposed = parts.get("exchange_exposed", 0.0) + parts.get("wait", 0.0)
    if not inside or name not in offsets or not exposed:
        return step
    wait = 0.0
    for key, entry in inside:
        came = arrivals.get(key)
        if came is None or entry.blocked_seconds is None or entry.ended_seconds is None:
            continue
        last = came.get(first, 0.0) if entry.name in FROM_ONE else max(came.values())
        blocked = entry.ended_seconds - entry.blocked_seconds
        wait += min(max(last - entry.blocked_seconds - offsets[name], 0.0), blocked)
    wait = min(wait, exposed)
    return msgspec.structs.replace(
        step, breakdown_seconds={**parts, "exchange_exposed": exposed - wait, "wait": wait}
    )


def _with_ready(
    steps: dict[str, list[Step]],
    known: Mapping[str, Mapping[Key, CollectiveCall]],
    arrivals: Mapping[Key, Mapping[str, float]],
    offsets: Mapping[str, float],
) -> dict[str, list[Step]]:
    """`ready_seconds`: when the first rank came to the step's first collective, and by how much
    this one was later than the first to come, in all of the step's collectives together."""
    late: dict[tuple[str, int], float] = {}
    base: dict[int, float] = {}
    complete = [name for name in steps if name in offsets]
    for name in complete:
        for number, inside in _by_step(steps[name], known[name]).items():
            for key, entry in inside:
                came = arrivals.get(key)
                if came is None or name not in came:
                    continue
                if entry.name in FROM_ONE and name != next(iter(steps)):
                    continue
                earliest = min(came.values())
                base[number] = min(base.get(number, earliest), earliest)
                late[name, number] = late.get((name, number), 0.0) + came[name] - earliest
    return {
        name: [
            msgspec.structs.replace(
                step,
                ready_seconds=base[step.step] + late[name, step.step] - offsets[name],
            )
            if (name, step.step) in late
            else step
            for step in entries
        ]
        for name, entries in steps.items()
    }
