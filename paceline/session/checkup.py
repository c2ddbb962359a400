"""The doctor's short form before step 1 of a job on several hosts: a hopeless job does not start.

Members meet at the store first; it tells them where worker 0 listens for the examination.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from torch._C._distributed_c10d import Store

from paceline import spec
from paceline.diagnose import doctor
from paceline.launch import Identity
from paceline.session import stores

DEADLINE_SECONDS = 60.0


def check(
    identity: Identity, store: Store, options: spec.Architecture, note: Callable[[str], None]
) -> None:
    """Raise what keeps this job from working, on every member; put the rest into the record.

    Returns at once on one host, where nothing lies between members, and in the tunnel, which has
    measured its links already.
    """
    if identity.on_one_host or identity.owns_interfaces:
        return
    needs = (
        doctor.Requirements()
        if options.sums_in_host
        else doctor.Requirements(shared_memory_bytes=0)
    )
    facts = doctor.gather(identity, os.environ)
    with _listening(identity, store) as (known, listener):
        examination = doctor.examine(
            known,
            facts,
            listener=listener,
            bandwidth=False,
            deadline_seconds=DEADLINE_SECONDS,
        )
    for finding in doctor.require_healthy(examination, needs):
        if finding.severity == "warning":
            note(f"{finding.problem} fix: {finding.fix}")


@contextmanager
def listening_beside_store(
    identity: Identity,
) -> Iterator[tuple[Identity, socket.socket | None]]:
    """Listen for `paceline doctor` where the launcher keeps a store at the coordinator's port."""
    store = stores.open_store(identity)
    assert store is not None, "there are several members"
    with _listening(identity, store) as known:
        yield known
    stores.leave(store, identity, range(identity.workers))


@contextmanager
def _listening(identity: Identity, store: Store) -> Iterator[tuple[Identity, socket.socket | None]]:
    if identity.index != 0:
        there = stores.agree(store, identity, "doctor", None)
        yield msgspec.structs.replace(identity, coordinator=there), None
        return
    with socket.create_server((identity.address, 0)) as listener:
        here = f"{identity.address}:{listener.getsockname()[1]}"
        stores.agree(store, identity, "doctor", here)
        yield msgspec.structs.replace(identity, coordinator=here), listener
