"""The store: where members leave each other notes before they can talk, and after they are done.

Worker 0 keeps it (`wire/store.py`), and answers members only. Values are bytes or text; nothing
read from it is unpickled. To torch it looks like one of its own stores, so that gloo meets there.

In a job that continues after a failure, worker 0 starts a process for it that outlives worker 0
(`launch/coordinator.py`).
"""

import contextlib
import json
import socket
import time
from collections.abc import Container, Iterable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError, DistNetworkError, DistStoreError

from paceline.diagnose import doctor
from paceline.errors import DeadlineError, ExchangeError, MissingError, PacelineError
from paceline.launch import Identity, coordinator
from paceline.wire import JobKey, StoreClient, StoreKeeper
from paceline.wire.store import Add, Check, Delete, Get, Request, Set, Wait, as_bytes

DEADLINE_SECONDS = 120.0
LEAVE_SECONDS = 60.0
POLL_SECONDS = 0.05


class JobStore(Store):
    """The job's store as torch's interface has it; any thread may use it."""

    def __init__(self, client: StoreClient, keeper: StoreKeeper | None, identity: Identity) -> None:
        super().__init__()
        self.keeper = keeper
        """The store that this process keeps, if any."""

        self.identity = identity
        """Identity of this member; a worker that joins learns its number only when the store is
        open."""

        self._client = client

    @property
    def outlives_worker_0(self) -> bool:
        """A process of its own keeps it."""
        return self.identity.goes_on

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Set(key, as_bytes(value)))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(Get(key)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = DEADLINE_SECONDS if timeout is None else timeout.total_seconds()
        self._ask(Wait(list(keys)), seconds)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(Check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(Add(key, amount)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Delete(key)))

    def close(self) -> None:
        self._client.close()
        if self.keeper is not None:
            self.keeper.close()

    def _ask(self, request: Request, seconds: float = DEADLINE_SECONDS) -> Any:
        """Errors are torch's: its own code, gloo's among it, knows no others."""
        try:
            return self._client.ask(request, seconds)
        except TimeoutError as error:
            raise DistStoreError(f"wait timeout after {seconds:g} s: {request!r}") from error
        except (OSError, EOFError, DeadlineError, ExchangeError) as error:
            raise DistNetworkError(f"the job's store is gone: {error}") from error


_kept: list[JobStore] = []
"""torch's objects refer to a store without keeping it; groups are never freed (decision 0004)."""


def open_store(identity: Identity) -> JobStore | None:
    """Meet the others; None for a job of one member."""
    if identity.workers + identity.servers == 1:
        return None
    key, keeper = JobKey(identity.key), None
    own: tuple[str, str] | None = None
    if identity.index == 0:
        listener = _listener(identity)
        own = listener.getsockname()[0], str(listener.getsockname()[1])
        if identity.goes_on:
            coordinator.start(listener, identity)
        else:
            keeper = StoreKeeper(listener, key)
    address, _, port = identity.coordinator.rpartition(":")
    if identity.store_is_kept:
        address, port = _told(identity, key, own)
    elif own is not None and identity.on_one_host:
        address, port = own
    try:
        client = StoreClient(address, int(port), key, identity.name, DEADLINE_SECONDS)
    except (OSError, DeadlineError) as error:
        if keeper is not None:
            keeper.close()
        raise _cannot_meet(identity) from error
    store = JobStore(client, keeper, identity)
    _kept.append(store)
    return store


def _listener(identity: Identity) -> socket.socket:
    """Listen where worker 0 keeps the store: a socket it was given, or the coordinator's port."""
    if identity.coordinator_descriptor >= 0:
        return socket.socket(fileno=identity.coordinator_descriptor)
    address, _, port = identity.coordinator.rpartition(":")
    if identity.store_is_kept:  # that port is the launcher's own
        port = "0"
    # A host may know itself by a name that leads nowhere for others, so it listens everywhere.
    where = address if identity.on_one_host else ""
    try:
        return socket.create_server((where, int(port)), backlog=1024)
    except OSError as error:
        problem = f"worker0 cannot listen at {identity.coordinator}: {error}"
        raise MissingError(problem, "name a free port: PACELINE_COORDINATOR=HOST:PORT.") from error


def _told(identity: Identity, key: JobKey, own: tuple[str, str] | None) -> tuple[str, str]:
    """Where worker 0 keeps the store, told through the launcher's own, which anybody may write to:
    so what is told carries a proof, and what does not is not listened to."""
    address, _, port = identity.coordinator.rpartition(":")
    try:
        open_to_all = TCPStore(
            address, int(port), is_master=False, timeout=timedelta(seconds=DEADLINE_SECONDS)
        )
    except (DistError, RuntimeError) as error:
        raise _cannot_meet(identity) from error
    name = f"paceline/{identity.attempt}"
    if own is not None:
        there = f"{identity.address}:{own[1]}"
        proof = key.derive(b"store", name.encode(), there.encode()).hex()
        open_to_all.set(name, json.dumps([there, proof]))
        return identity.address, own[1]
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(DistError, RuntimeError, ValueError, TypeError, AttributeError):
            if open_to_all.check([name]):
                there, proof = json.loads(open_to_all.get(name))
                if key.matches(bytes.fromhex(proof), b"store", name.encode(), there.encode()):
                    address, _, port = there.rpartition(":")
                    return address, port
        time.sleep(POLL_SECONDS)
    raise DeadlineError("learning where worker0 keeps the store", DEADLINE_SECONDS, ["worker0"])


def _cannot_meet(identity: Identity) -> PacelineError:
    """The cause that the store could not be reached, as far as it can be found out."""
    address, _, port = identity.coordinator.rpartition(":")
    problem = doctor.reach(address, int(port))
    if problem and identity.index != 0:
        return MissingError(*doctor.unreachable(identity, problem, DEADLINE_SECONDS))
    who = f"worker0 at {identity.coordinator}"
    return DeadlineError("meeting at the store", DEADLINE_SECONDS, [who])


def leave(
    store: Store,
    identity: Identity,
    workers: Iterable[int],
    message: str = "",
    gone: Container[str] = (),
) -> dict[str, str]:
    """Say that this member is done, and return the messages that members left.

    The first worker waits for all others, which may need the store that worker 0 keeps, and gets
    the messages. `workers` are those that remain; of them and of the servers some may be `gone`.
    """
    workers = sorted(workers)
    outlives = isinstance(store, JobStore) and store.outlives_worker_0
    if 0 not in workers and not outlives:
        return {}  # the store is gone with worker 0
    try:
        store.set(f"left/{identity.name}", message)
    except DistNetworkError:
        if not outlives:
            raise
        return {}  # its process has seen all others end
    collector = workers[0] if outlives and workers else 0
    if identity.role != "worker" or identity.rank != collector:
        return {}
    names = [f"worker{rank}" for rank in workers]
    names += [f"server{rank}" for rank in range(identity.servers)]
    # One that was there from the start and failed never says so: the launcher has already seen it.
    with contextlib.suppress(DistError, RuntimeError):
        awaited = [f"left/{name}" for name in names if name not in gone]
        store.wait(awaited, timedelta(seconds=LEAVE_SECONDS))
    left = {
        name: store.get(f"left/{name}").decode() for name in names if store.check([f"left/{name}"])
    }
    return {name: text for name, text in left.items() if text}


def give_up(store: Store, identity: Identity) -> None:
    """Say that this worker, which joined, has failed: no launcher of the others sees it."""
    with contextlib.suppress(DistError, RuntimeError):
        store.set(f"left/{identity.name}", "")


def agree(store: Store | None, identity: Identity, key: str, value: str | None) -> str:
    """Return worker 0's `value`, on every member."""
    if identity.index == 0:
        assert value is not None, "worker 0 brings the value"
        if store is not None:
            store.set(key, value)
        return value
    assert store is not None, "a job of several members has a store"
    try:
        return bytes(store.get(key)).decode()
    except (DistError, RuntimeError) as error:
        raise unanswered(error, identity, f"learning {key}") from error


def unanswered(error: Exception, identity: Identity, operation: str) -> PacelineError:
    """Why worker 0 has not answered: it is gone, and the store with it, or it did not come."""
    if isinstance(error, DistNetworkError):
        lost = "worker0 was lost, and the job's store with it"
        return ExchangeError(f"{lost}: {identity.name} waited there ({operation}).")
    return DeadlineError(operation, DEADLINE_SECONDS, ["worker0"])
