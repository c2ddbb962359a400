"""Packets on plain sockets: TCP between hosts, an abstract Unix socket inside one.

A payload goes to the kernel from the memory it is in, and comes from the kernel into the memory
where it belongs: the kernel's own two copies are all there are. `line.py` has the bytes of one
connection. Each begins with the handshake (`handshake.py`); until it is done nothing else is read
or sent. Whoever calls and does not show in time that it knows the job's key is shown the door, and
costs no more than a place among few.
"""

import contextlib
import errno
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.errors import ExchangeError
from paceline.wire.connection import (
    CONNECT_SECONDS,
    LENGTH,
    Stream,
    accepted,
    connected,
    unacknowledged,
)
from paceline.wire.handshake import HELLO_BYTES, Callee, Caller, Lobby
from paceline.wire.keys import JobKey
from paceline.wire.mailbox import LINGER_SECONDS, Mailbox, Packet, T

_TURN_BYTES = 8 << 20
"""Read from one connection before the others get their turn."""

_AGAIN_SECONDS = 0.1
"""Until one that was not let in calls again, and until one without room for a line looks again."""

_DRAIN_SECONDS = 0.005
"""Between two looks whether the kernel has sent all."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True)
class _Call:
    """A server that has not let us in yet."""

    endpoint: str
    until: float | None = None
    """When we give up, once the line was lost. One that is silent may still be getting ready."""

    again_at: float | None = None
    """When to call again, after the line was lost."""


class StreamMailbox(Mailbox[T]):
    """One connection to each member it talks with."""

    def __init__(self, name: str, kind: Any, key: JobKey) -> None:
        super().__init__(name, key)
        self._decoder = msgspec.msgpack.Decoder(tuple[list[int], list[kind]])
        self._listener: socket.socket | None = None
        self._listens_at: float | None = None
        """When to listen again, while there is no room for another line."""
        self._servers: dict[str, Stream[T]] = {}
        self._workers: dict[str, Stream[T]] = {}
        self._streams: dict[int, Stream[T]] = {}
        self._lobby: Lobby[Stream[T]] = Lobby()
        self._calls: dict[str, _Call] = {}
        self._poll = select.epoll()
        # Told of once for each time that it is written to: there is no need to read it.
        self._poll.register(self._wake_descriptor, select.EPOLLIN | select.EPOLLET)

    def bind(self, address: str = "") -> str:
        if address:
            self._listener = socket.create_server((address, 0), backlog=1024)
            endpoint = f"{address}:{self._listener.getsockname()[1]}"
        else:
            endpoint = f"@paceline-{secrets.token_hex(16)}"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind("\0" + endpoint[1:])
            self._listener.listen(1024)
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.EPOLLIN)
        return endpoint

    def connect(self, peer: str, endpoint: str) -> None:
        try:
            line = connected(endpoint)
        except OSError as error:
            raise self._unreachable(peer, endpoint, error) from error
        self._calls[peer] = _Call(endpoint)
        stream: Stream[T] = Stream(line, peer, Caller(self._key, self.name, peer), False)
        self._servers[peer] = stream
        self._add(stream)

    def close(self) -> None:
        end = time.monotonic() + LINGER_SECONDS
        # What others still send is not read any more, but for what lets us in.
        waiting = select.poll()
        for stream in self._streams.values():
            if stream.unsent:
                waiting.register(stream.line, select.POLLOUT if stream.open else select.POLLIN)
        while any(s.unsent for s in self._streams.values()) and time.monotonic() < end:
            for descriptor, _ in waiting.poll(50):
                stream = self._streams[descriptor]
                self._finish(stream)
                if stream.closed or not stream.unsent:
                    waiting.unregister(descriptor)
                    stream.unsent.clear()
                elif stream.open:
                    waiting.modify(descriptor, select.POLLOUT)
        # A socket that is closed with unread bytes takes back what it still has to send.
        lines = [stream.line for stream in self._streams.values() if stream.open]
        while any(map(unacknowledged, lines)) and time.monotonic() < end:
            time.sleep(_DRAIN_SECONDS)
        for stream in list(self._streams.values()):
            self._drop(stream)
        if self._listener is not None:
            self._listener.close()
        self._poll.close()
        os.close(self._wake_descriptor)

    def abandon(self) -> None:
        """Called in a process that was forked: the lines are the other one's."""
        for stream in self._streams.values():
            os.close(stream.line.detach())
        self._streams.clear()
        if self._listener is not None and self._listener.fileno() >= 0:
            os.close(self._listener.detach())

    def _finish(self, stream: Stream[T]) -> None:
        """Send more of what is left at the end, once we have been let in."""
        if not stream.open:
            stream.fill()
            with contextlib.suppress(ExchangeError):
                self._greet(stream)
        if stream.open:
            stream.write()

    def send(
        self,
        peer: str,
        messages: Sequence[T],
        payloads: Sequence[Any] = (),
        tracked: bool = False,
    ) -> None:
        self._packet(self._servers[peer], messages, payloads, tracked=tracked)

    def reply(
        self, peer: str, messages: Sequence[T], payloads: Sequence[Any] = (), copy: bool = False
    ) -> None:
        self._packet(self._workers.get(peer), messages, payloads, copy=copy)

    def _packet(
        self,
        stream: Stream[T] | None,
        messages: Sequence[T],
        payloads: Sequence[Any],
        copy: bool = False,
        tracked: bool = False,
    ) -> None:
        if stream is None or stream.is_deaf:
            return
        if stream.closed and stream.peer not in self._calls:
            return
        views = [memoryview(payload).cast("B") for payload in payloads]
        head = self._encoder.encode(([len(view) for view in views], messages))
        self._write(stream, head, views, messages if tracked else None)
        if copy:
            for place in range(-min(len(views), len(stream.unsent)), 0):
                stream.unsent[place] = bytes(stream.unsent[place])

    def _write(
        self,
        stream: Stream[T],
        head: bytes,
        views: Sequence[memoryview],
        tracked: Sequence[T] | None = None,
    ) -> None:
        idle = stream.open and not stream.unsent
        stream.put([LENGTH.pack(len(head)) + head, *views], tracked)
        if idle:
            self._go_on(stream)

    def _go_on(self, stream: Stream[T]) -> None:
        """Send what the kernel takes now; ask to be told when it takes more."""
        waited = stream.waits
        self.bytes_sent += stream.write()
        if stream.tracked:
            self.departed.extend(stream.departed())
        if waited != stream.waits:
            events = select.EPOLLIN | (select.EPOLLOUT if stream.waits else 0)
            self._poll.modify(stream.line, events)

    def _receive(self, timeout_seconds: float) -> list[Packet[T]]:
        packets: list[Packet[T]] = []
        unsettled = self._calls or self._lobby.until or self._listens_at is not None
        if unsettled:
            timeout_seconds = self._lobby.timeout(min(timeout_seconds, _AGAIN_SECONDS))
        for descriptor, events in self._poll.poll(max(0.0, timeout_seconds)):
            stream = self._streams.get(descriptor)
            if stream is not None:
                if events & select.EPOLLOUT:
                    self._go_on(stream)
                if events & ~select.EPOLLOUT and not stream.closed:
                    self._read(stream, packets)
            elif descriptor != self._wake_descriptor and self._listener is not None:
                self._admit(self._listener)
        if unsettled:  # after all that came in time was read
            self._settle_calls()
        return packets

    def _read(self, stream: Stream[T], packets: list[Packet[T]]) -> None:
        """Add to `packets` what one connection has, up to a fair number of bytes."""
        before = stream.bytes_received
        more = True
        while more and not stream.closed and stream.bytes_received - before < _TURN_BYTES:
            more = stream.fill()
            if not stream.open:
                self._greet(stream)
            while stream.open and (packet := self._next(stream)) is not None:
                packets.append(packet)
        self.bytes_received += stream.bytes_received - before
        if stream.closed:
            self._drop(stream)
        else:
            stream.be_patient()

    def _next(self, stream: Stream[T]) -> Packet[T] | None:
        """The next packet that has wholly come."""
        if stream.messages is None:
            head = stream.take_head()
            if head is None:
                return None
            try:
                sizes, stream.messages = self._decoder.decode(head)
            except msgspec.MsgspecError as error:
                reason = f"{self.name} got a packet it cannot read from {stream.peer}."
                raise ExchangeError(reason) from error
            stream.expect(sizes, self.place(stream.messages) if sizes else None)
        if stream.missing:
            return None
        messages, stream.messages = stream.messages, None
        return Packet(stream.peer, messages, stream.payloads, stream.for_server)

    def _greet(self, stream: Stream[T]) -> None:
        """Go on with the handshake, as far as what has come allows."""
        while not stream.open and not stream.closed:
            head = stream.take_head(at_most=HELLO_BYTES)
            if head is None:
                break
            if isinstance(stream.handshake, Callee):
                self._welcome(stream, stream.handshake, head)
            else:
                self._introduce(stream, stream.handshake, bytes(head))
        if stream.closed and stream.for_server and not stream.open:
            self.refused += 1

    def _welcome(self, stream: Stream[T], handshake: Callee, hello: memoryview) -> None:
        """Somebody says who it is: a member is let in, a stranger is told nothing."""
        answer = handshake.welcome(hello)
        stream.say(answer or b"")
        if answer is None:
            stream.closed = True
            return
        self._lobby.leave(stream)
        stream.open, stream.peer = True, handshake.caller
        self._workers[stream.peer] = stream

    def _introduce(self, stream: Stream[T], handshake: Caller, head: bytes) -> None:
        """The server asks who we are, or lets us in."""
        if not handshake.has_answered and (hello := handshake.answer(head)) is not None:
            stream.say(hello)
        elif handshake.accepts(head):
            stream.open = True
            self._calls.pop(stream.peer, None)
            self._go_on(stream)
        else:
            there = self._calls[stream.peer].endpoint
            reason = f"{self.name} and {stream.peer} at {there} do not know the same key"
            raise ExchangeError(f"{reason}; give every host the same PACELINE_KEY.")

    def _admit(self, listener: socket.socket) -> None:
        """Take one that calls; whatever is wrong with it is its own affair."""
        try:
            line = accepted(listener)
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._make_room(listener)
            elif not isinstance(error, BlockingIOError):  # a stranger, or it has given up
                self.refused += 1
            return
        handshake = Callee(self._key, self.name)
        stream: Stream[T] = Stream(line, "", handshake, for_server=True)
        self._add(stream)
        stream.say(handshake.challenge)
        gone = self._lobby.enter(stream)
        if gone is not None:
            self._refuse(gone)

    def _make_room(self, listener: socket.socket) -> None:
        """There are no descriptors left: those go who have not said who they are; then we pause."""
        for stream in self._lobby.everybody():
            self._refuse(stream)
        self._poll.unregister(listener)
        self._listens_at = time.monotonic() + _AGAIN_SECONDS

    def _settle_calls(self) -> None:
        """End what takes too long, and call again where we were not let in."""
        now = time.monotonic()
        for stream in self._lobby.overdue():
            self._refuse(stream)
        if self._listens_at is not None and now >= self._listens_at:
            assert self._listener is not None
            self._poll.register(self._listener, select.EPOLLIN)
            self._listens_at = None
        for peer, call in list(self._calls.items()):
            if call.again_at is not None and now >= call.again_at:
                self._call_again(peer, call)

    def _call_again(self, peer: str, call: _Call) -> None:
        """The line was lost before we were let in: too many called at once."""
        stream, now = self._servers[peer], time.monotonic()
        call.until = call.until or now + CONNECT_SECONDS
        if now >= call.until:
            error = ConnectionError("it closes the connection before it lets us in")
            raise self._unreachable(peer, call.endpoint, error)
        try:
            line = connected(call.endpoint, call.until - now)
        except OSError as error:
            raise self._unreachable(peer, call.endpoint, error) from error
        call.again_at = None
        again: Stream[T] = Stream(line, peer, Caller(self._key, self.name, peer), False)
        again.unsent, again.tracked, again.bytes_put = (
            stream.unsent,
            stream.tracked,
            stream.bytes_put,
        )
        self._servers[peer] = again
        self._add(again)

    def _unreachable(self, peer: str, endpoint: str, error: OSError) -> ExchangeError:
        reason = error.strerror or str(error)
        return ExchangeError(f"{self.name} cannot reach {peer} at {endpoint} ({reason}).")

    def _add(self, stream: Stream[T]) -> None:
        self._streams[stream.line.fileno()] = stream
        self._poll.register(stream.line, select.EPOLLIN)

    def _refuse(self, stream: Stream[T]) -> None:
        self.refused += 1
        self._drop(stream)

    def _drop(self, stream: Stream[T]) -> None:
        known = (self._servers.get(stream.peer), self._workers.get(stream.peer))
        if stream.open and stream in known:
            self.lost.append(stream.peer)
        stream.closed = True
        self._lobby.leave(stream)
        if self._streams.pop(stream.line.fileno(), None) is not None:
            self._poll.unregister(stream.line)
            stream.line.close()
        if (call := self._calls.get(stream.peer)) is not None and not stream.for_server:
            call.again_at = time.monotonic() + _AGAIN_SECONDS
            return
        stream.unsent.clear()
        if self._workers.get(stream.peer) is stream:
            del self._workers[stream.peer]
