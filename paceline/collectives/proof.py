"""Workers that met by gloo prove to each other, before a value travels, that they know the key.

gloo asks nobody who they are, and the number by which it tells callers apart is 0, 1, 2: while a
group is made, whoever finds its port first is taken for a member, hears gradients and sends some.
So each two say over their own connection what only members can say; where one does not, the group
is left behind and another one made (decision 0171).
"""

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.collectives.context import Context
from paceline.errors import ExchangeError
from paceline.wire import JobKey

TRIES = 3
PROOF_SECONDS = 20.0
"""A stranger need not answer at all. All have met: a member does within moments."""

PROOF_BYTES = 32


def proven(
    context: Context,
    store: Store,
    members: Sequence[int],
    make: Callable[[Store], Any],
    keep: Callable[[Any], Any],
    tries: int = TRIES,
) -> Any:
    """What `make` makes with a store of its own: a gloo group in which each of `members` is one.

    Called by all of them at once. `keep` is called with what gloo's threads may hold on to.
    """
    rank, patience = context.identity.rank, timedelta(seconds=context.deadline_seconds)
    names = [f"worker{member}" for member in members]
    for attempt in range(tries):
        apart = PrefixStore(f"try{attempt}", store)
        fresh = _meet(apart, members, rank, patience)
        group = make(apart)
        wrong = _strangers(group, JobKey(context.identity.key), fresh, members, rank, keep)
        if _all_fine(apart, members, rank, not wrong, patience):
            return group
        keep(group)
    who = " and ".join(names[at] for at in wrong) or "another worker"
    raise ExchangeError(
        f"{who} did not prove to {context.identity.name} over gloo's connection that it knows the "
        "job's key: somebody else took its place while connections were made, or it stood still. "
        "No gradient or weight was sent. Start the job again; among those who do such things use "
        "server, whose ports let nobody in."
    )


def _meet(store: Store, members: Sequence[int], rank: int, patience: timedelta) -> bytes:
    """A random number of the first member's, once all are there: gloo's port is then open for
    moments, and not until the last one has come."""
    if rank == members[0]:
        store.set("fresh", secrets.token_hex(16))
    store.set(f"here/{rank}", "")
    store.wait(["fresh", *(f"here/{member}" for member in members)], patience)
    return bytes(store.get("fresh"))


def _strangers(
    group: Any,
    key: JobKey,
    fresh: bytes,
    members: Sequence[int],
    rank: int,
    keep: Callable[[Any], Any],
) -> list[int]:
    """Places in the group of those who do not say what a member would."""
    others = [at for at, member in enumerate(members) if member != rank]

    def proof(sender: int, receiver: int) -> bytes:
        return key.derive(b"gloo", fresh, str(sender).encode(), str(receiver).encode())

    heard, works = {}, []
    for at in others:
        said = torch.frombuffer(bytearray(proof(rank, members[at])), dtype=torch.uint8)
        heard[at] = torch.zeros(PROOF_BYTES, dtype=torch.uint8)
        keep((said, heard[at]))
        works += [(at, group.recv([heard[at]], at, 0)), (at, group.send([said], at, 0))]
    end, wrong = time.monotonic() + PROOF_SECONDS, set()
    for at, work in works:
        keep(work)
        try:
            work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError:
            wrong.add(at)
    for at in others:
        if bytes(heard[at].numpy()) != proof(members[at], rank):
            wrong.add(at)
    return sorted(wrong)


def _all_fine(
    store: Store, members: Sequence[int], rank: int, fine: bool, patience: timedelta
) -> bool:
    """Whether every member says so, which all of them learn alike."""
    store.add("fine", int(fine))
    store.set(f"tried/{rank}", "")
    store.wait([f"tried/{member}" for member in members], patience)
    return store.add("fine", 0) == len(members)
