"""The store: where members leave each other notes before they can talk, and after they are done.

Worker 0 keeps it (`wire/store.py`), and answers members only. Values are bytes or text; nothing
read from it is unpickled. To torch it looks like one of its own stores, so that gloo meets there.

Where members go on without a lost worker 0, the next worker keeps the store: all know where before
they train (`JobStore.arrange_successors`), and whose connection closes goes there, with its own
notes.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Container, Iterable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError, DistNetworkError, DistStoreError

from paceline.diagnose import doctor
from paceline.errors import DeadlineError, ExchangeError, MissingError, PacelineError
from paceline.launch import Identity
from paceline.wire import JobKey, StoreClient, StoreKeeper
from paceline.wire.store import Add, Check, Delete, Get, Request, Set, Wait, as_bytes

DEADLINE_SECONDS = 120.0
LEAVE_SECONDS = 60.0
FOLLOW_SECONDS = 20.0
"""A store that is opened already is reached at once, or its keeper is gone."""

POLL_SECONDS = 0.05
NEVER = "never"
"""A note that nobody leaves: whoever waits for it hears when the keeper is gone."""

WATCH_SECONDS = 3600.0


class JobStore(Store):
    """The job's store as torch's interface has it; any thread may use it."""

    def __init__(self, client: StoreClient, keeper: StoreKeeper | None, identity: Identity) -> None:
        super().__init__()
        self.keeper = keeper
        """Where this process keeps the store."""

        self.identity = identity
        """Who asks; a worker that joins hears its number only when the store is open."""

        self._client = client
        self._successors: list[str] = []
        """Where each worker would keep the store, by rank; the first is the one who does."""
        self._rank = 0
        """Of the worker that keeps it."""
        self._notes: dict[str, bytes] = {}
        """What was left from here, for the next keeper."""
        self._moving = threading.Lock()
        self._is_closed = False

    @property
    def has_successors(self) -> bool:
        """It outlives the worker that keeps it."""
        return bool(self._successors)

    @property
    def is_kept_here(self) -> bool:
        """Others need this process to read and leave notes."""
        return self.identity.role == "worker" and self.identity.rank == self._rank

    def arrange_successors(self, workers: int) -> None:
        """Called by all members alike: from here on the store outlives the worker that keeps it.

        What a lost keeper had left itself is gone with it; what others had left they leave again.
        """
        identity, found = self.identity, list[str]()
        try:
            if identity.role == "worker" and identity.rank < workers:
                self.set(f"successor/{identity.rank}", self.keep())
            while len(found) < workers:
                found.append(self.get(f"successor/{len(found)}").decode())
        except (DistError, RuntimeError) as error:
            missing = [f"worker{len(found)}"]
            raise DeadlineError("meeting the other workers", DEADLINE_SECONDS, missing) from error
        self._successors = found
        threading.Thread(target=self._watch, name="paceline-successors", daemon=True).start()

    def _watch(self) -> None:
        """Notice at once that the keeper is gone: others may wait for what was left from here."""
        while not self._is_closed:
            client = self._client
            try:
                client.ask(Wait([NEVER]), WATCH_SECONDS)
            except TimeoutError:
                continue
            except (OSError, EOFError, DeadlineError, ExchangeError):
                if self._is_closed or not self._go_to_successor(client):
                    return

    def _go_to_successor(self, gone: StoreClient) -> bool:
        """The keeper is gone: go to the next who is there. False where there is none."""
        with self._moving:
            if self._client is not gone:  # another thread was first
                return True
            while self._rank + 1 < len(self._successors):
                self._rank += 1
                with contextlib.suppress(OSError, EOFError, PacelineError):
                    self._follow(self._successors[self._rank], patient=False)
                    for key, value in list(self._notes.items()):
                        self._client.ask(Set(key, value), FOLLOW_SECONDS)
                    return True
            return False

    def keep(self) -> str:
        """Keep a store here, for when the one who keeps it is lost; returns where it is."""
        identity = self.identity
        if self.keeper is None:
            where = identity.address if identity.on_one_host else ""
            listener = socket.create_server((where, 0), backlog=1024)
            self.keeper = StoreKeeper(listener, JobKey(identity.key))
        return f"{identity.address}:{self.keeper.address[1]}"

    def follow(self, address: str) -> None:
        """Ask the keeper at `address` from now on; what was left at the one before is gone."""
        self._follow(address, patient=True)

    def _follow(self, address: str, *, patient: bool) -> None:
        host, _, port = address.rpartition(":")
        identity, before = self.identity, self._client
        key = JobKey(identity.key)
        self._client = StoreClient(
            host, int(port), key, identity.name, FOLLOW_SECONDS, patient=patient
        )
        before.close()

    def set(self, key: str, value: str | bytes) -> None:
        if self._successors:
            self._notes[key] = as_bytes(value)
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
        self._notes.pop(key, None)
        return bool(self._ask(Delete(key)))

    def close(self) -> None:
        self._is_closed = True
        self._client.close()
        if self.keeper is not None:
            self.keeper.close()

    def _ask(self, request: Request, seconds: float = DEADLINE_SECONDS) -> Any:
        """Errors are torch's: its own code, gloo's among it, knows no others."""
        end = time.monotonic() + seconds
        while True:
            client = self._client
            try:
                return client.ask(request, max(0.0, end - time.monotonic()))
            except TimeoutError as error:
                raise DistStoreError(f"wait timeout after {seconds:g} s: {request!r}") from error
            except (OSError, EOFError, DeadlineError, ExchangeError) as error:
                if self._is_closed or not self._go_to_successor(client):
                    raise DistNetworkError(f"the job's store is gone: {error}") from error


_kept: list[JobStore] = []
"""torch's objects refer to a store without keeping it; groups are never freed (decision 0004)."""


def open_store(identity: Identity) -> JobStore | None:
    """Meet the others; None for a job of one member."""
    if identity.workers + identity.servers == 1:
        return None
    key, keeper = JobKey(identity.key), None
    if identity.index == 0:
        keeper = StoreKeeper(_listener(identity), key)
    address, _, port = identity.coordinator.rpartition(":")
    if identity.store_is_kept:
        address, port = _told(identity, key, keeper)
    elif keeper is not None and identity.on_one_host:
        address, port = keeper.address
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
    """Where worker 0 keeps the store: a socket it was given, or the coordinator's port."""
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


def _told(identity: Identity, key: JobKey, keeper: StoreKeeper | None) -> tuple[str, str]:
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
    if keeper is not None:
        there = f"{identity.address}:{keeper.address[1]}"
        proof = key.derive(b"store", name.encode(), there.encode()).hex()
        open_to_all.set(name, json.dumps([there, proof]))
        return identity.address, keeper.address[1]
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
    """Say that this member is done; who keeps the store waits for all, for others may need it.

    `workers` are those that are still there, but for whom of them and of the servers is `gone`. The
    keeper gets the messages that members left.
    """
    workers = list(workers)
    keeps = store.is_kept_here if isinstance(store, JobStore) else identity.index == 0
    if 0 not in workers and not (isinstance(store, JobStore) and store.has_successors):
        return {}  # the store is gone with worker 0, or those who are left need it no more
    try:
        store.set(f"left/{identity.name}", message)
    except DistNetworkError:
        if not (isinstance(store, JobStore) and store.has_successors):
            raise
        return {}  # the keeper was lost when all others had ended
    if not keeps:
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
        raise unanswered(error, identity, f"learning {key}") from error


def unanswered(error: Exception, identity: Identity, operation: str) -> PacelineError:
    """Why worker 0 has not answered: it is gone, and the store with it, or it did not come."""
    if isinstance(error, DistNetworkError):
        lost = "worker0 was lost, and the job's store with it"
        return ExchangeError(f"{lost}: {identity.name} waited there ({operation}).")
    return DeadlineError(operation, DEADLINE_SECONDS, ["worker0"])
