"""The job's store: key-value notes that members leave for each other, kept by one of them.

Only members are answered, and every note is encrypted. The keeper is one thread with a mailbox of
requests; a member asks through connections of its own, one for each thread that waits.
"""

import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.errors import DeadlineError
from paceline.wire.blocking import BlockingChannel
from paceline.wire.keys import JobKey
from paceline.wire.mailbox import Closed, Mailbox, Packet

KEEPER = "store"
"""The name by which it is called."""

LARGEST_NOTE_BYTES = 2**32 - 1
IDLE_SECONDS = 5.0


class Set(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str
    value: bytes


class Get(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered when there is such a note."""

    key: str


class Wait(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered when all of these are there."""

    keys: list[str]


class Check(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered at once: whether all of these are there."""

    keys: list[str]


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Count; answered with the new number."""

    key: str
    amount: int


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str


Request = Set | Get | Wait | Check | Add | Delete


class StoreKeeper:
    """Keeps the notes, in a thread of its own, until it is closed."""

    def __init__(
        self, listener: socket.socket, key: JobKey, notes: Mapping[str, bytes] | None = None
    ) -> None:
        """Keep these notes from the start."""
        self._address = listener.getsockname()[:2]
        self._notes: dict[str, bytes] = dict(notes or {})
        self._waiting: list[tuple[str, list[str], str | None]] = []
        """Who waits for which notes, and for the content of which of them."""
        self._mailbox: Mailbox[Any] = Mailbox(
            KEEPER, Request, key, encrypted=True, largest_head=LARGEST_NOTE_BYTES
        )
        self._mailbox.listen(listener)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="paceline-store", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, str]:
        """Host and port where it listens."""
        host, port = self._address
        return host, str(port)

    @property
    def has_members(self) -> bool:
        """A member of the job is connected."""
        return self._mailbox.has_workers

    @property
    def refused(self) -> int:
        """Calls by peers that were not authenticated."""
        return self._mailbox.refused

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._mailbox.wake()
            self._thread.join(timeout=5.0)
            if not self._thread.is_alive():
                self._mailbox.close()

    def _keep(self) -> None:
        while not self._closing.is_set():
            for event in self._mailbox.receive(IDLE_SECONDS):
                if isinstance(event, Closed):
                    self._waiting = [entry for entry in self._waiting if entry[0] != event.peer]
                    continue
                for request in event.messages:
                    self._handle(event.peer, request)

    def _answer(self, peer: str, value: Any) -> None:
        self._mailbox.send(Packet(peer, [value]))

    def _handle(self, peer: str, request: Request) -> None:
        notes = self._notes
        match request:
            case Set(key, value):
                notes[key] = value
                self._answer(peer, None)
                self._answer_waiting()
            case Get(key) if key in notes:
                self._answer(peer, notes[key])
            case Get(key):
                self._waiting.append((peer, [key], key))
            case Wait(keys) if all(key in notes for key in keys):
                self._answer(peer, None)
            case Wait(keys):
                self._waiting.append((peer, keys, None))
            case Check(keys):
                self._answer(peer, all(key in notes for key in keys))
            case Add(key, amount):
                notes[key] = str(int(notes.get(key, b"0")) + amount).encode()
                self._answer(peer, int(notes[key]))
                self._answer_waiting()
            case Delete(key):
                self._answer(peer, notes.pop(key, None) is not None)

    def _answer_waiting(self) -> None:
        still = []
        for peer, keys, wanted in self._waiting:
            if all(key in self._notes for key in keys):
                self._answer(peer, None if wanted is None else self._notes[wanted])
            else:
                still.append((peer, keys, wanted))
        self._waiting = still


class StoreClient:
    """A member's way to the store; any of its threads may ask. Raises TimeoutError if the answer
    takes too long, and another OSError if the keeper is gone."""

    def __init__(
        self,
        address: str,
        port: int,
        key: JobKey,
        name: str,
        seconds: float,
        *,
        patient: bool = True,
    ) -> None:
        """Wait up to `seconds` for the keeper, which may start later if the caller is `patient`."""
        self._endpoint, self._key, self._name = f"{address}:{port}", key, name
        self._connections = itertools.count()
        self._idle: deque[BlockingChannel] = deque()
        self._idle.append(self._open(time.monotonic() + seconds, seconds, patient=patient))

    def ask(self, request: Request, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            channel = self._idle.pop()
        except IndexError:  # others of our threads wait for their answers
            channel = self._open(deadline, seconds, patient=False)
        try:
            channel.send(msgspec.msgpack.encode(([], [request])), deadline)
            _, (answer,) = msgspec.msgpack.decode(channel.receive(deadline))
        except BaseException:
            channel.close()
            raise
        self._idle.append(channel)
        return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _open(self, deadline: float, seconds: float, *, patient: bool) -> BlockingChannel:
        # The keeper tells a member's connections apart by their names.
        own = f"{self._name}/{os.getpid()}/{next(self._connections)}"
        try:
            return BlockingChannel.reach(
                self._endpoint,
                self._key,
                own,
                KEEPER,
                encrypted=True,
                deadline=deadline,
                patient=patient,
                largest_head=LARGEST_NOTE_BYTES,
            )
        except OSError as error:
            if time.monotonic() >= deadline:
                raise DeadlineError("meeting at the store", seconds, ["worker0"]) from error
            raise


def as_bytes(value: str | bytes | Sequence[int]) -> bytes:
    """Return a note as torch hands it over."""
    return value.encode() if isinstance(value, str) else bytes(value)
