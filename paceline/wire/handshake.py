"""Before a byte of a connection counts, both ends show that they know the job's key.

    callee -> caller    a random number
    caller -> callee    who calls, a random number of its own, a proof over both
    callee -> caller    a proof over both; nothing at all where it refuses

A proof holds for these two numbers and these two names, so what was overheard opens nothing later.
The secret itself never travels. What moves the bytes is `stream.py` and `store.py`.
"""

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from paceline.wire.keys import JobKey

HELLO_SECONDS = 5.0
"""How long one who calls may take to say who it is."""

HELLO_BYTES = 1024
"""More than a hello can have; what announces more is refused before it is read."""

AT_ONCE = 128
"""Callers that have not said who they are; the first to come makes room for one more."""

NONCE_BYTES = 32

L = TypeVar("L")


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    caller: str
    nonce: bytes
    proof: bytes


class Caller:
    """The end that opened the connection, to a member that it knows by name."""

    def __init__(self, key: JobKey, own: str, callee: str) -> None:
        self._key, self._own, self._callee = key, own, callee
        self._said: tuple[bytes, ...] | None = None

    def answer(self, challenge: bytes) -> bytes | None:
        """The hello; None to one that does not begin as a member does."""
        if len(challenge) != NONCE_BYTES or self._said is not None:
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._said = (challenge, nonce, self._own.encode(), self._callee.encode())
        return msgspec.msgpack.encode(
            _Hello(self._own, nonce, self._key.derive(b"caller", *self._said))
        )

    @property
    def has_answered(self) -> bool:
        return self._said is not None

    def accepts(self, proof: bytes) -> bool:
        """Whether the other end knows the key too."""
        return self._said is not None and self._key.matches(proof, b"callee", *self._said)

    def session(self) -> bytes:
        """A secret of this connection alone."""
        assert self._said is not None, "there is none before both have spoken"
        return self._key.derive(b"session", *self._said)


class Callee:
    """The end that was called."""

    def __init__(self, key: JobKey, own: str) -> None:
        self.challenge = secrets.token_bytes(NONCE_BYTES)
        self.caller = ""
        """Its name, once it is known."""

        self._key, self._own = key, own
        self._said: tuple[bytes, ...] = ()

    def welcome(self, hello: bytes | memoryview) -> bytes | None:
        """The answer to a member; None to a stranger."""
        try:
            heard = msgspec.msgpack.decode(hello, type=_Hello)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        said = (self.challenge, heard.nonce, heard.caller.encode(), self._own.encode())
        known = self._key.matches(heard.proof, b"caller", *said)
        if not known or len(heard.nonce) != NONCE_BYTES or not heard.caller:
            return None
        self.caller, self._said = heard.caller, said
        return self._key.derive(b"callee", *said)

    def session(self) -> bytes:
        assert self._said, "there is none before both have spoken"
        return self._key.derive(b"session", *self._said)


class Lobby(Generic[L]):
    """Who has called and not yet said who it is: not many, and not for long."""

    def __init__(
        self,
        at_once: int = AT_ONCE,
        seconds: float = HELLO_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._at_once, self._seconds, self._clock = at_once, seconds, clock
        self.until: dict[L, float] = {}
        """Who is in -> when it must have said who it is; in the order they came."""

    def __len__(self) -> int:
        return len(self.until)

    def enter(self, caller: L) -> L | None:
        """Take one in; returns the one that has to go for it."""
        self.until[caller] = self._clock() + self._seconds
        if len(self.until) <= self._at_once:
            return None
        first = next(iter(self.until))
        del self.until[first]
        return first

    def leave(self, caller: L) -> None:
        self.until.pop(caller, None)

    def everybody(self) -> list[L]:
        return list(self.until)

    def overdue(self) -> list[L]:
        """Those whose time is over; they are in no longer."""
        now = self._clock()
        late = []
        for caller, until in self.until.items():  # in the order they came
            if until > now:
                break
            late.append(caller)
        for caller in late:
            del self.until[caller]
        return late

    def timeout(self, at_most: float) -> float:
        """How long to wait for anything before somebody is overdue."""
        if not self.until:
            return at_most
        return max(0.0, min(at_most, next(iter(self.until.values())) - self._clock()))


def is_own_user(line: socket.socket) -> bool:
    """Whether a process of ours, or root's, is at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user in (0, os.geteuid())
