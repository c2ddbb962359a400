"""Why a job stands still, as far as steps, stacks and connections tell it."""

from collections.abc import Mapping, Sequence

from paceline.diagnose.connections import Unheard
from paceline.diagnose.thread_stacks import ThreadStack

_LOADING = ("/torch/utils/data/", "/paceline/data/", "/paceline/session/loader/sharding.py")
_NETWORK = "a cable that is out, a port that is blocked, or a host that is gone"


def likely_cause(
    steps: Mapping[str, int],
    stacks: Mapping[str, ThreadStack],
    ends: Mapping[str, Sequence[Unheard]],
    owners: Mapping[str, str] | None = None,
) -> str | None:
    """Return the cause in words; None if nothing points to one.

    `steps` of all workers; `stacks` and `ends` (what does not answer) of the members that live;
    `owners` of addresses.
    """
    known_as = (owners or {}).get
    silent = [end.words(name, known_as(end.address)) for name in ends for end in ends[name]]
    if silent:
        return f"the network: {silent[0]} ({_NETWORK})"
    least, most = min(steps.values()), max(steps.values())
    behind = [name for name, number in steps.items() if number == least < most]
    gone = [name for name in behind if name not in ends]
    if gone:
        return (
            f"uneven data: {', '.join(gone)} had batches for {least} steps only; take them from "
            "paceline.shard(loader), and skip or stop on all workers alike"
        )
    # Who loads the next batch has done as many steps as those who wait for its gradients.
    loading = [name for name in behind or steps if name in stacks and _loads(stacks[name])]
    if loading:
        waits = "waits for its next batch" if len(loading) == 1 else "wait for their next batches"
        return f"data: {', '.join(loading)} {waits}"
    for name in behind:
        stack = stacks.get(name)
        if stack is not None and stack.place is not None:
            return f"{name} is held up in its script at {stack.place.words}"
    places = {name: stacks[name].place for name in steps if name in stacks}
    known = {name: place for name, place in places.items() if place is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{name} in {place.words}" for name, place in sorted(known.items()))
        return f"exchanges in different orders, or one that not all take part in: {listed}"
    return None


def _loads(stack: ThreadStack) -> bool:
    return any(part in frame.file for frame in stack.frames for part in _LOADING)
