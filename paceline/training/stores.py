"""The store: where members leave each other notes before they can talk, and after they are done.

torch's TCPStore, kept by worker 0 or by the launcher where it has one. Values are text; nothing
read from it is unpickled.
"""

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from paceline.errors import DeadlineError, MissingError, PacelineError
from paceline.launch import Identity, doctor

DEADLINE_SECONDS = 120.0
LEAVE_SECONDS = 60.0


def open_store(identity: Identity) -> Store | None:
    """Meet the others; None for a job of one member."""
    if identity.workers + identity.servers == 1:
        return None
    address, _, port = identity.coordinator.rpartition(":")
    options: dict[str, Any] = {}
    if keeps(identity) and identity.coordinator_descriptor >= 0:
        options["master_listen_fd"] = identity.coordinator_descriptor
    try:
        store = TCPStore(
            address,
            int(port),
            is_master=keeps(identity),
            wait_for_workers=False,
            timeout=timedelta(seconds=DEADLINE_SECONDS),
            **options,
        )
    except (DistError, RuntimeError) as error:
        raise _cannot_meet(identity, error) from error
    # A store that the launcher keeps outlives its restarts, and so would an old attempt's notes.
    return PrefixStore(f"attempt{identity.attempt}", store) if identity.store_is_kept else store


def _cannot_meet(identity: Identity, error: Exception) -> PacelineError:
    """The cause that the store could not be opened, as far as it can be found out."""
    address, _, port = identity.coordinator.rpartition(":")
    if keeps(identity):
        problem = f"worker0 cannot listen at {identity.coordinator}: {error}"
        return MissingError(problem, "name a free port: PACELINE_COORDINATOR=HOST:PORT.")
    problem = doctor.reach(address, int(port))
    if problem:
        return MissingError(*doctor.unreachable(identity, problem, DEADLINE_SECONDS))
    who = f"worker0 at {identity.coordinator}"
    return DeadlineError("meeting at the store", DEADLINE_SECONDS, [who])


def keeps(identity: Identity) -> bool:
    """Whether the store lives in this process."""
    return identity.index == 0 and not identity.store_is_kept


def leave(
    store: Store, identity: Identity, workers: Iterable[int], message: str = ""
) -> dict[str, str]:
    """Say that this member is done; worker 0 waits for all, for others may still need the store.

    `workers` are those that are still there. Without worker 0 the store is gone too. Worker 0 gets
    the messages that members left.
    """
    workers = list(workers)
    if 0 not in workers:
        return {}
    store.set(f"left/{identity.name}", message)
    if identity.index != 0:
        return {}
    names = [f"left/worker{rank}" for rank in workers]
    names += [f"left/server{rank}" for rank in range(identity.servers)]
    # A member that failed never says so here; the launcher has already seen it.
    with contextlib.suppress(DistError, RuntimeError):
        store.wait(names, timedelta(seconds=LEAVE_SECONDS))
    left = {name: store.get(name).decode() for name in names if store.check([name])}
    return {name.removeprefix("left/"): text for name, text in left.items() if text}


def agree(store: Store | None, identity: Identity, key: str, value: str | None) -> str:
    """Worker 0's `value`, on every member."""
    if identity.index == 0:
        assert value is not None, "worker 0 brings the value"
        if store is not None:
            store.set(key, value)
        return value
    assert store is not None, "a job of several members has a store"
    try:
        return bytes(store.get(key)).decode()
    except (DistError, RuntimeError) as error:
        raise DeadlineError(f"learning {key}", DEADLINE_SECONDS, ["worker0"]) from error
