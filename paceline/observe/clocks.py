"""The clocks of several hosts, aligned by the collectives that their members ended together.

No member can leave an all-reduce before the last one has come, and all leave it within the time of
its last messages. So the offset of two clocks is the median difference of such ends; how far the
differences spread is its error, and arrivals bound it from both sides.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from paceline.record import CollectiveCall

TOGETHER = ("all_reduce", "all_gather", "all_gather_into_tensor", "_allgather_base", "barrier",
            "allreduce_coalesced", "reduce_scatter", "reduce_scatter_tensor",
            "_reduce_scatter_base", "all_to_all", "all_to_all_single", "alltoall_base")  # fmt: skip
"""Collectives that no member leaves before all have come."""

FEWEST = 5
"""Fewer common ends tell no clock."""

SPREAD = 0.8
"""Share of the differences that lies inside the error bar."""

Key = tuple[str, int]
"""A collective: its group, and its number there."""


class Offset(NamedTuple):
    """What to add to a member's times to get the reference's."""

    seconds: float
    error_seconds: float
    """Half of the range in which most differences lie."""

    collectives: int
    """How many common ends it rests on; 0 where the members share a clock."""


def by_key(entries: Sequence[CollectiveCall]) -> dict[Key, CollectiveCall]:
    """A member's collectives by group and number."""
    return {(entry.group, entry.number): entry for entry in entries}


def align(
    members: Mapping[str, Sequence[CollectiveCall]], clocks: Mapping[str, str]
) -> dict[str, Offset]:
    """Each member's offset from the clock of the first; a member that cannot be placed is absent.

    `clocks` names the clock of each member; those with the same name share one.
    """
    names = list(members)
    if not names:
        return {}
    known = {name: by_key(entries) for name, entries in members.items()}
    offsets = {clocks[names[0]]: Offset(0.0, 0.0, 0)}
    pending = {clocks[name] for name in names} - offsets.keys()
    while pending:
        found = {clock: _between(clock, offsets, known, clocks) for clock in pending}
        placed = {clock: offset for clock, offset in found.items() if offset is not None}
        if not placed:
            break
        offsets |= placed
        pending -= placed.keys()
    return {name: offsets[clocks[name]] for name in names if clocks[name] in offsets}


def _between(
    clock: str,
    offsets: Mapping[str, Offset],
    known: Mapping[str, Mapping[Key, CollectiveCall]],
    clocks: Mapping[str, str],
) -> Offset | None:
    """The offset of one clock from the reference, by way of every member that is placed."""
    differences: list[float] = []
    low, high = float("-inf"), float("inf")
    for name in (name for name in known if clocks[name] == clock):
        for other in (other for other in known if clocks[other] in offsets):
            shift = offsets[clocks[other]].seconds
            for key in known[name].keys() & known[other].keys():
                own, theirs = known[name][key], known[other][key]
                if own.name not in TOGETHER or own.ended_seconds is None:
                    continue
                if theirs.ended_seconds is None:
                    continue
                differences.append(theirs.ended_seconds + shift - own.ended_seconds)
                low = max(low, theirs.arrived_seconds + shift - own.ended_seconds)
                high = min(high, theirs.ended_seconds + shift - own.arrived_seconds)
    if len(differences) < FEWEST:
        return None
    seconds = median(differences)
    if low <= high:  # else the clocks drift, and no one offset fits all
        seconds = min(max(seconds, low), high)
    ordered = sorted(differences)
    cut = int((1 - SPREAD) / 2 * len(ordered))
    spread = (ordered[-1 - cut] - ordered[cut]) / 2
    if low <= high:
        spread = min(spread, max(high - seconds, seconds - low))
    return Offset(seconds, spread, len(differences))
