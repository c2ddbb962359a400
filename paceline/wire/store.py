"""The job's store: small notes that members leave each other, kept by one of them.

Only members are answered (`handshake.py`), and only members can read or change what is said
(`sealing.py`). The keeper is one thread; a stranger costs it a place among few for a few seconds.
"""

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.errors import DeadlineError, ExchangeError
from paceline.wire.handshake import HELLO_BYTES, Callee, Caller, Lobby
from paceline.wire.keys import JobKey
from paceline.wire.sealing import LENGTH, Seal

KEEPER = "store"
"""The name by which it is called."""

READ_BYTES = 1 << 18
ADMITTED_AT_ONCE = 32
"""Calls taken in one turn of the keeper, and a turn with calls takes at least `TURN_SECONDS`: a
flood of strangers gets no more of the keeper's process than that."""

TURN_SECONDS = 0.01
IDLE_SECONDS = 5.0
AGAIN_SECONDS = 0.05


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
_decoder = msgspec.msgpack.Decoder(Request)


class StoreKeeper:
    """Keeps the notes, in a thread of its own, until it is closed."""

    def __init__(
        self, listener: socket.socket, key: JobKey, notes: Mapping[str, bytes] | None = None
    ) -> None:
        """Keep these notes from the start."""
        self.refused = 0
        """Strangers that called."""
        self._listener, self._key = listener, key
        self._notes: dict[str, bytes] = dict(notes or {})
        self._num_members = 0
        self._waiting: list[tuple[_Visit, list[str], str | None]] = []
        """Who waits for which notes, and for what one of them says."""
        self._lobby: Lobby[_Visit] = Lobby()
        self._selector = selectors.DefaultSelector()
        self._closing = threading.Event()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._keep, name="paceline-store", daemon=True)
        self._thread.start()

    @property
    def has_members(self) -> bool:
        """A member of the job is connected."""
        return self._num_members > 0

    @property
    def address(self) -> tuple[str, str]:
        """Host and port where it listens."""
        host, port = self._listener.getsockname()[:2]
        return host, str(port)

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(timeout=5.0)
        self._listener.close()

    def _keep(self) -> None:
        while not self._closing.is_set():
            came = self._selector.select(self._lobby.timeout(IDLE_SECONDS))
            began, called = time.monotonic(), False
            for event, _ in came:
                if event.data is None:
                    called = True
                    self._admit()
                else:
                    self._attend(event.data)
            for visit in self._lobby.overdue():
                self._end(visit)
            if called:
                self._closing.wait(max(0.0, began + TURN_SECONDS - time.monotonic()))
        for visit in [key.data for key in self._selector.get_map().values() if key.data]:
            self._end(visit)
        self._selector.close()

    def _admit(self) -> None:
        for _ in range(ADMITTED_AT_ONCE):
            try:
                line, _ = self._listener.accept()
            except OSError as error:  # nobody is left, or it has gone meanwhile, or
                if error.errno in (errno.EMFILE, errno.ENFILE):  # there is no room: strangers go
                    for stranger in self._lobby.everybody():
                        self._end(stranger)
                return
            visit = _Visit(line, Callee(self._key, KEEPER))
            self._selector.register(line, selectors.EVENT_READ, visit)
            visit.say(LENGTH.pack(len(visit.handshake.challenge)) + visit.handshake.challenge)
            gone = self._lobby.enter(visit)
            if gone is not None:
                self._end(gone)

    def _attend(self, visit: "_Visit") -> None:
        """Take what has come, answer what is whole."""
        if visit.line.fileno() < 0:  # ended in this very turn
            return
        try:
            visit.flush()
            frames = visit.take()
            for frame in frames:
                if visit.seals is None:
                    self._welcome(visit, frame)
                else:
                    self._answer(visit, _decoder.decode(visit.seals[0].open(frame)))
        except (OSError, EOFError, ExchangeError, msgspec.MsgspecError):
            self._end(visit)
            return
        self._listen(visit)

    def _welcome(self, visit: "_Visit", hello: bytes) -> None:
        answer = visit.handshake.welcome(hello)
        visit.say(LENGTH.pack(len(answer or b"")) + (answer or b""))
        if answer is None:
            raise ExchangeError("a stranger")
        self._lobby.leave(visit)
        session = visit.handshake.session()
        visit.seals = Seal(session, "request"), Seal(session, "answer")
        self._num_members += 1

    def _answer(self, visit: "_Visit", request: Request) -> None:
        notes = self._notes
        match request:
            case Set(key, value):
                notes[key] = value
                visit.answer(None)
                self._tell_waiting()
            case Get(key) if key in notes:
                visit.answer(notes[key])
            case Get(key):
                self._waiting.append((visit, [key], key))
            case Wait(keys) if all(key in notes for key in keys):
                visit.answer(None)
            case Wait(keys):
                self._waiting.append((visit, keys, None))
            case Check(keys):
                visit.answer(all(key in notes for key in keys))
            case Add(key, amount):
                notes[key] = str(int(notes.get(key, b"0")) + amount).encode()
                visit.answer(int(notes[key]))
                self._tell_waiting()
            case Delete(key):
                visit.answer(notes.pop(key, None) is not None)

    def _tell_waiting(self) -> None:
        still = []
        for visit, keys, wanted in self._waiting:
            if not all(key in self._notes for key in keys):
                still.append((visit, keys, wanted))
            elif visit.line.fileno() >= 0:
                visit.answer(None if wanted is None else self._notes[wanted])
                self._listen(visit)
        self._waiting = still

    def _listen(self, visit: "_Visit") -> None:
        """To what it says, and for room while there is more to tell it."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if visit.unsent else 0)
        self._selector.modify(visit.line, wanted, visit)

    def _end(self, visit: "_Visit") -> None:
        if visit.seals is None:
            self.refused += 1
        self._lobby.leave(visit)
        self._waiting = [entry for entry in self._waiting if entry[0] is not visit]
        if visit.line.fileno() >= 0:
            self._num_members -= visit.seals is not None
            self._selector.unregister(visit.line)
            visit.line.close()


class _Visit:
    """One connection, seen by the keeper."""

    def __init__(self, line: socket.socket, handshake: Callee) -> None:
        line.setblocking(False)
        self.line, self.handshake = line, handshake
        self.seals: tuple[Seal, Seal] | None = None
        """What it asks with and is answered with, once it has shown that it is a member."""
        self.unsent: deque[bytes] = deque()
        self._came = bytearray()

    def say(self, content: bytes) -> None:
        self.unsent.append(content)
        with contextlib.suppress(OSError):  # who is gone is noticed when it is read from
            self.flush()

    def answer(self, value: Any) -> None:
        assert self.seals is not None
        self.say(self.seals[1].close(msgspec.msgpack.encode(value)))

    def flush(self) -> None:
        while self.unsent:
            content = self.unsent[0]
            try:
                count = self.line.send(content)
            except BlockingIOError:
                return
            if count < len(content):
                self.unsent[0] = content[count:]
                return
            self.unsent.popleft()

    def take(self) -> list[bytes]:
        """The frames that have wholly come; EOFError where no more will."""
        try:
            content = self.line.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not content:
            raise EOFError
        self._came += content
        frames = []
        while len(self._came) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._came)
            if self.seals is None and size > HELLO_BYTES:
                raise ExchangeError("a stranger")
            if len(self._came) < LENGTH.size + size:
                break
            frames.append(bytes(self._came[LENGTH.size : LENGTH.size + size]))
            del self._came[: LENGTH.size + size]
            if self.seals is None:
                break  # what follows the hello means something only after it
        return frames


class StoreClient:
    """A member's way to the store; any of its threads may ask. Raises TimeoutError where the answer
    takes too long, and another OSError where the keeper is gone."""

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
        """Waits for the keeper, which may start later where one is `patient`, so many seconds."""
        self._address, self._port, self._key, self._name = address, port, key, name
        self._idle: deque[_Way] = deque()
        self._idle.append(self._open(time.monotonic() + seconds, seconds, patient=patient))

    def ask(self, request: Request, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            way = self._idle.pop()
        except IndexError:  # others of our threads wait for their answers
            way = self._open(deadline, seconds, patient=False)
        try:
            answer = way.ask(request, deadline)
        except BaseException:
            way.line.close()
            raise
        self._idle.append(way)
        return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().line.close()

    def _open(self, deadline: float, seconds: float, *, patient: bool) -> "_Way":
        """A connection of its own; `patient` where nobody listens yet."""
        while True:
            try:
                return _Way(self._address, self._port, self._key, self._name, deadline)
            except (OSError, EOFError) as error:
                # A keeper that many call at once may close a line before it has said hello.
                refused = isinstance(error, ConnectionRefusedError | socket.gaierror)
                if time.monotonic() >= deadline:
                    raise DeadlineError("meeting at the store", seconds, ["worker0"]) from error
                if refused and not patient:
                    raise
            time.sleep(AGAIN_SECONDS)


class _Way:
    """One connection to the keeper, past the handshake."""

    def __init__(self, address: str, port: int, key: JobKey, name: str, deadline: float) -> None:
        self.line = socket.create_connection((address, port), _left(deadline, at_most=10.0))
        try:
            self.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = Caller(key, name, KEEPER)
            hello = caller.answer(self._frame(_soon(deadline), HELLO_BYTES))
            if hello is None:
                raise ExchangeError(f"what listens at {address}:{port} is not the job's store.")
            self.line.sendall(LENGTH.pack(len(hello)) + hello)
            if not caller.accepts(self._frame(_soon(deadline), HELLO_BYTES)):
                told = f"{name} and worker0 at {address}:{port} do not know the same key"
                raise ExchangeError(f"{told}; give every host the same PACELINE_KEY.")
        except BaseException:
            self.line.close()
            raise
        session = caller.session()
        self._request, self._answer = Seal(session, "request"), Seal(session, "answer")

    def ask(self, request: Request, deadline: float) -> Any:
        self.line.settimeout(_left(deadline))
        self.line.sendall(self._request.close(msgspec.msgpack.encode(request)))
        return msgspec.msgpack.decode(self._answer.open(self._frame(deadline)))

    def _frame(self, deadline: float, at_most: int | None = None) -> bytes:
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size, deadline))
        if at_most is not None and size > at_most:
            raise ExchangeError("what listens there is not the job's store.")
        return self._exactly(size, deadline)

    def _exactly(self, count: int, deadline: float) -> bytes:
        came = bytearray()
        while len(came) < count:
            self.line.settimeout(_left(deadline))
            content = self.line.recv(min(count - len(came), READ_BYTES))
            if not content:
                raise ConnectionResetError("the job's store has closed the connection")
            came += content
        return bytes(came)


def _left(deadline: float, at_most: float = float("inf")) -> float:
    return min(at_most, max(0.001, deadline - time.monotonic()))


def _soon(deadline: float) -> float:
    """A keeper under a flood may never come to this call: it is made again instead."""
    return min(deadline, time.monotonic() + 10.0)


def as_bytes(value: str | bytes | Sequence[int]) -> bytes:
    """A note as torch hands it over."""
    return value.encode() if isinstance(value, str) else bytes(value)
