"""Authenticate those who call before anything else sees them, and bound what the others cost.

An unauthenticated peer costs a descriptor among few, for a few seconds, and at most one kilobyte is
read of it. A flood of them costs a part of one core.
"""

import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.wire.channel import LARGEST_HEAD_BYTES, Channel
from paceline.wire.handshake import Responder
from paceline.wire.keys import JobKey
from paceline.wire.sockets import accepted

HELLO_SECONDS = 5.0
"""How long a caller may take to authenticate itself."""

AT_ONCE = 128
"""Callers that are not authenticated yet; the oldest makes room for one more."""

ACCEPTED_AT_ONCE = 32
PAUSE_SECONDS = 0.01
"""At most that many calls are accepted in that time: a flood gets no more of the process."""

NO_ROOM_SECONDS = 0.1
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

P = TypeVar("P")


class UnauthenticatedPeers(Generic[P]):
    """Who has called and is not authenticated yet: not many, and not for long."""

    def __init__(
        self,
        at_once: int = AT_ONCE,
        seconds: float = HELLO_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._at_once, self._seconds, self._clock = at_once, seconds, clock
        self.until: dict[P, float] = {}
        """Peer -> when it must have authenticated itself; in the order they called."""

    def __len__(self) -> int:
        return len(self.until)

    def add(self, peer: P) -> P | None:
        """Add one; returns the one that has to go for it."""
        self.until[peer] = self._clock() + self._seconds
        if len(self.until) <= self._at_once:
            return None
        first = next(iter(self.until))
        del self.until[first]
        return first

    def remove(self, peer: P) -> None:
        self.until.pop(peer, None)

    def overdue(self) -> list[P]:
        """Remove and return those whose time is over."""
        now, late = self._clock(), list[P]()
        for peer, until in self.until.items():  # in the order they called
            if until > now:
                break
            late.append(peer)
        for peer in late:
            del self.until[peer]
        return late

    def timeout(self, at_most: float) -> float:
        """Return how long to wait for anything before a peer is overdue."""
        if not self.until:
            return at_most
        return max(0.0, min(at_most, next(iter(self.until.values())) - self._clock()))


class ChannelListener:
    """A listening socket; `fileno` is readable when `accept` has something to do."""

    def __init__(
        self,
        listener: socket.socket,
        key: JobKey,
        name: str,
        *,
        encrypted: bool,
        largest_head: int = LARGEST_HEAD_BYTES,
        largest_payload: int = LARGEST_HEAD_BYTES,
    ) -> None:
        self.refused = 0
        """Calls by peers that were not authenticated."""
        self.peers = UnauthenticatedPeers[Channel]()
        self._listener, self._key, self._name = listener, key, name
        self._encrypted = encrypted
        self._largest_head, self._largest_payload = largest_head, largest_payload
        self._channels: dict[int, Channel] = {}
        self._counted_since, self._accepted = 0.0, 0
        self._resumes_at: float | None = None
        """When to accept again, after a flood or while no descriptor was left."""
        listener.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(listener, select.EPOLLIN)

    def fileno(self) -> int:
        return self._poll.fileno()

    @property
    def is_busy(self) -> bool:
        """`accept` has something to do when `timeout` is over, even if `fileno` is not readable."""
        return bool(self.peers.until) or self._resumes_at is not None

    def timeout(self, at_most: float) -> float:
        """Return how long to wait for `fileno` before `accept` has something to do."""
        if self._resumes_at is not None:
            at_most = min(at_most, max(0.0, self._resumes_at - time.monotonic()))
        return self.peers.timeout(at_most)

    def accept(self) -> list[Channel]:
        """Return the channels of those who are authenticated since the last call; never waits."""
        members = []
        for descriptor, _ in self._poll.poll(0):
            channel = self._channels.get(descriptor)
            if descriptor == self._listener.fileno():
                self._take_calls()
            elif channel is not None and not channel.closed:  # None: refused since the poll
                channel.authenticate()
                if channel.closed:
                    self._refuse(channel)
                elif channel.is_open:
                    self._forget(channel)
                    members.append(channel)
        for channel in self.peers.overdue():
            self._refuse(channel)
        if self._resumes_at is not None and time.monotonic() >= self._resumes_at:
            self._resumes_at = None
            self._poll.register(self._listener, select.EPOLLIN)
        return members

    def close(self) -> None:
        """Close the listening socket, and drop those who are not authenticated. In a process that
        was forked this closes its copies and changes nothing that both share."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._listener.close()
        self._poll.close()

    def _take_calls(self) -> None:
        now = time.monotonic()
        if now >= self._counted_since + PAUSE_SECONDS:
            self._counted_since, self._accepted = now, 0
        while self._accepted < ACCEPTED_AT_ONCE:
            self._accepted += 1
            try:
                connection = accepted(self._listener)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_ROOM:
                    for channel in list(self._channels.values()):
                        self._refuse(channel)
                    self._pause(now + NO_ROOM_SECONDS)
                    return
                self.refused += 1  # it has given up, or is another user's
                continue
            self._add(connection)
        self._pause(self._counted_since + PAUSE_SECONDS)

    def _pause(self, until: float) -> None:
        self._poll.unregister(self._listener)
        self._resumes_at = until

    def _add(self, connection: socket.socket) -> None:
        handshake = Responder(self._key, self._name, self._encrypted)
        channel = Channel(connection, handshake, self._largest_head, self._largest_payload)
        self._channels[connection.fileno()] = channel
        self._poll.register(connection, select.EPOLLIN)
        first = self.peers.add(channel)
        if first is not None:
            self._refuse(first)

    def _refuse(self, channel: Channel) -> None:
        self.refused += 1
        self._forget(channel)
        channel.close()

    def _forget(self, channel: Channel) -> None:
        self.peers.remove(channel)
        if self._channels.pop(channel.socket.fileno(), None) is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(channel.socket)
