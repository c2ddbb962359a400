"""Parcels on plain sockets: TCP between hosts, an abstract Unix socket inside one.

A payload goes to the kernel from the memory it is in, and comes from the kernel into the memory
where it belongs: the kernel's own two copies are all there are. A parcel on the wire is

    length of the head (4 bytes) | head: sizes of the payloads, messages (msgpack) | payloads

and a connection begins with a head that says who calls and proves that it knows the job's key.
"""

import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Generic

import msgspec
import numpy as np

from paceline.errors import ExchangeError
from paceline.wire.keys import JobKey
from paceline.wire.post import LINGER_SECONDS, Parcel, Post, T

_LENGTH = struct.Struct("<I")
_HEAD_BYTES = 4096
"""Read at once where a head is expected; what it holds of a payload is copied once more."""

_HELLO_BYTES = 1024
_TURN_BYTES = 8 << 20
"""Read from one connection before the others get their turn."""

_PATIENT_BYTES = 512 << 10
"""A large payload wakes the thread when so much of it has come, not at every packet."""

_LOOPBACK_BYTES = 512 << 10
"""The kernel holds of what is to be sent inside one host: more would fall out of the cores' cache
before it is read. Between hosts the kernel finds what the way needs."""

_UNSENT_BYTES = 256 << 10
"""The kernel holds for another host beyond what is on its way: nothing can overtake it there."""

_BUFFERS_AT_ONCE = 64
CONNECT_SECONDS = 30.0


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    name: str
    proof: bytes


class StreamPost(Post[T]):
    """One connection to each member it talks with."""

    def __init__(self, name: str, kind: Any, key: JobKey) -> None:
        super().__init__(name, key)
        self._decoder = msgspec.msgpack.Decoder(tuple[list[int], list[kind]])
        self._listener: socket.socket | None = None
        self._servers: dict[str, _Stream[T]] = {}
        self._workers: dict[str, _Stream[T]] = {}
        self._streams: dict[int, _Stream[T]] = {}
        self._poll = select.epoll()
        self._poll.register(self._wake_descriptor, select.EPOLLIN)

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
            line = _connected(endpoint)
        except OSError as error:
            reason = f"{self.name} cannot reach {peer} at {endpoint} ({error.strerror or error})."
            raise ExchangeError(reason) from error
        stream = self._servers[peer] = self._add(line, peer)
        hello = msgspec.msgpack.encode(_Hello(self.name, self._key.proof(self.name)))
        self._write(stream, hello, ())

    def close(self) -> None:
        end = time.monotonic() + LINGER_SECONDS
        waiting = select.poll()  # for room alone: what others still send is not read any more
        for stream in self._streams.values():
            if stream.unsent:
                waiting.register(stream.line, select.POLLOUT)
        while any(s.unsent for s in self._streams.values()) and time.monotonic() < end:
            for descriptor, _ in waiting.poll(50):
                stream = self._streams[descriptor]
                stream.write()
                if not stream.unsent:
                    waiting.unregister(descriptor)
        for stream in list(self._streams.values()):
            self._drop(stream)
        if self._listener is not None:
            self._listener.close()
        self._poll.close()
        os.close(self._wake_descriptor)

    def send(
        self,
        peer: str,
        messages: Sequence[T],
        payloads: Sequence[Any] = (),
        tracked: bool = False,
    ) -> None:
        self._parcel(self._servers[peer], messages, payloads, tracked=tracked)

    def reply(
        self, peer: str, messages: Sequence[T], payloads: Sequence[Any] = (), copy: bool = False
    ) -> None:
        self._parcel(self._workers.get(peer), messages, payloads, copy=copy)

    def _parcel(
        self,
        stream: "_Stream[T] | None",
        messages: Sequence[T],
        payloads: Sequence[Any],
        copy: bool = False,
        tracked: bool = False,
    ) -> None:
        if stream is None or stream.closed or stream.is_deaf:
            return
        views = [memoryview(payload).cast("B") for payload in payloads]
        head = self._encoder.encode(([len(view) for view in views], messages))
        self._write(stream, head, views, messages if tracked else None)
        if copy:
            for place in range(-min(len(views), len(stream.unsent)), 0):
                stream.unsent[place] = bytes(stream.unsent[place])

    def _write(
        self,
        stream: "_Stream[T]",
        head: bytes,
        views: Sequence[memoryview],
        tracked: Sequence[T] | None = None,
    ) -> None:
        idle = not stream.unsent
        stream.put([_LENGTH.pack(len(head)) + head, *views], tracked)
        if idle:
            self._go_on(stream)

    def _go_on(self, stream: "_Stream[T]") -> None:
        """Send what the kernel takes now; ask to be told when it takes more."""
        waited = stream.waits
        self.bytes_sent += stream.write()
        if stream.tracked:
            self.departed.extend(stream.departed())
        if waited != stream.waits:
            events = select.EPOLLIN | (select.EPOLLOUT if stream.waits else 0)
            self._poll.modify(stream.line, events)

    def _receive(self, timeout_seconds: float) -> list[Parcel[T]]:
        parcels: list[Parcel[T]] = []
        for descriptor, events in self._poll.poll(max(0.0, timeout_seconds)):
            if descriptor == self._wake_descriptor:
                self._awake()
            elif descriptor in self._streams:
                stream = self._streams[descriptor]
                if events & select.EPOLLOUT:
                    self._go_on(stream)
                if events & ~select.EPOLLOUT and not stream.closed:
                    self._read(stream, parcels)
            elif self._listener is not None:
                self._admit(self._listener)
        return parcels

    def _read(self, stream: "_Stream[T]", parcels: list[Parcel[T]]) -> None:
        """Add to `parcels` what one connection has, up to a fair number of bytes."""
        before = stream.bytes_received
        more = True
        while more and not stream.closed and stream.bytes_received - before < _TURN_BYTES:
            more = stream.fill()
            if not stream.peer:
                self._welcome(stream)
            while stream.peer and (parcel := self._next(stream)) is not None:
                parcels.append(parcel)
        self.bytes_received += stream.bytes_received - before
        if stream.closed:
            self._drop(stream)
        else:
            stream.be_patient()

    def _next(self, stream: "_Stream[T]") -> Parcel[T] | None:
        """The next parcel that has wholly come."""
        if stream.messages is None:
            head = stream.take_head()
            if head is None:
                return None
            try:
                sizes, stream.messages = self._decoder.decode(head)
            except msgspec.MsgspecError as error:
                reason = f"{self.name} got a parcel it cannot read from {stream.peer}."
                raise ExchangeError(reason) from error
            stream.expect(sizes, self.place(stream.messages) if sizes else None)
        if stream.missing:
            return None
        messages, stream.messages = stream.messages, None
        return Parcel(stream.peer, messages, stream.payloads, stream.for_server)

    def _welcome(self, stream: "_Stream[T]") -> None:
        """Find out who has called; a stranger is shown the door."""
        if (head := stream.take_head(at_most=_HELLO_BYTES)) is None:
            if stream.closed:
                self.refused += 1
            return
        try:
            hello = msgspec.msgpack.decode(head, type=_Hello)
        except msgspec.MsgspecError:
            hello = _Hello("", b"")
        if self._key.accepts(hello.name, hello.proof):
            stream.peer = hello.name
            self._workers[hello.name] = stream
        else:
            self.refused += 1
            stream.closed = True

    def _admit(self, listener: socket.socket) -> None:
        try:
            line, _ = listener.accept()
        except BlockingIOError:  # who called has given up
            return
        self._add(line, peer="")

    def _add(self, line: socket.socket, peer: str) -> "_Stream[T]":
        """Take up a connection to `peer`, or from one who has not said yet who it is."""
        line.setblocking(False)
        if line.family != socket.AF_UNIX:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if line.getsockname()[0] == line.getpeername()[0]:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BYTES)
            else:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        stream: _Stream[T] = _Stream(line, peer, for_server=not peer)
        self._streams[line.fileno()] = stream
        self._poll.register(line, select.EPOLLIN)
        return stream

    def _drop(self, stream: "_Stream[T]") -> None:
        if stream in (self._servers.get(stream.peer), self._workers.get(stream.peer)):
            self.lost.append(stream.peer)
        stream.closed = True
        stream.unsent.clear()
        if self._streams.pop(stream.line.fileno(), None) is not None:
            self._poll.unregister(stream.line)
            stream.line.close()
        if self._workers.get(stream.peer) is stream:
            del self._workers[stream.peer]


class _Stream(Generic[T]):
    """One connection: what is still to be sent, and the parcel that is just coming."""

    def __init__(self, line: socket.socket, peer: str, for_server: bool) -> None:
        self.line, self.peer, self.for_server = line, peer, for_server
        self.closed = False
        self.is_deaf = False
        """The other side takes no more; what it has sent may still be on its way."""
        self.waits = False
        """For the kernel to take more."""
        self.unsent: deque[memoryview | bytes] = deque()
        self.bytes_put = self.bytes_sent = self.bytes_received = 0
        self.tracked: deque[tuple[int, Sequence[T]]] = deque()
        """At how many bytes sent which messages have departed."""
        self.messages: list[T] | None = None
        """Of the parcel whose payloads are coming."""
        self.payloads: list[memoryview | None] = []
        self.missing: deque[memoryview] = deque()
        """What of the payloads has not come, in order."""
        self._start = memoryview(bytearray(_HEAD_BYTES))
        self._begin = self._end = 0
        self._lowest = 1
        self._is_tcp = line.family != socket.AF_UNIX

    def put(self, parts: Sequence[memoryview | bytes], tracked: Sequence[T] | None) -> None:
        """To be sent; `tracked` are the messages to tell of when all of it has been."""
        self.unsent.extend(parts)
        self.bytes_put += sum(map(len, parts))
        if tracked is not None:
            self.tracked.append((self.bytes_put, tracked))

    def departed(self) -> Iterator[Sequence[T]]:
        while self.tracked and self.tracked[0][0] <= self.bytes_sent:
            yield self.tracked.popleft()[1]

    def write(self) -> int:
        """Hand the kernel what it takes; returns the bytes."""
        unsent, total = self.unsent, 0
        self.waits = False
        while unsent:
            try:
                count = self.line.sendmsg(islice(unsent, _BUFFERS_AT_ONCE))
            except BlockingIOError:
                self.waits = True
                break
            except OSError:  # its last words are read before it is dropped
                self.is_deaf = True
                unsent.clear()
                break
            total += count
            while unsent and count >= len(unsent[0]):
                count -= len(unsent.popleft())
            if count:  # it took a part, so it has no more room
                unsent[0] = unsent[0][count:]
                self.waits = True
                break
        self.bytes_sent += total
        return total

    def fill(self) -> bool:
        """Take once from the kernel: what is missing of payloads, and what follows to where heads
        come. False when it has no more for now."""
        missing, room = self.missing, self._start[self._end :]
        try:
            count = self.line.recvmsg_into([*missing, room])[0]
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if count == 0:
            self.closed = True
            return False
        self.bytes_received += count
        while missing and count >= len(missing[0]):
            count -= len(missing.popleft())
        if missing:
            missing[0] = missing[0][count:]
            return False
        self._end += count
        return count == len(room)

    def take_head(self, at_most: int | None = None) -> memoryview | None:
        """The next head, when all of it is there; more than `at_most` bytes close the line. It is
        to be read before more is taken from the kernel."""
        there = self._end - self._begin
        if there < _LENGTH.size:
            self._make_room(_LENGTH.size)
            return None
        (length,) = _LENGTH.unpack_from(self._start, self._begin)
        if at_most is not None and length > at_most:
            self.closed = True
            return None
        if there < _LENGTH.size + length:
            self._make_room(_LENGTH.size + length)
            return None
        begin = self._begin + _LENGTH.size
        self._begin = begin + length
        return self._start[begin : self._begin]

    def expect(self, sizes: Sequence[int], place: memoryview | None) -> None:
        """Payloads of these sizes follow; the first belongs into `place`, if it is given."""
        self.payloads = []
        for number, size in enumerate(sizes):
            if number == 0 and place is not None and place.nbytes == size:
                target = place
                self.payloads.append(None)
            else:
                target = np.empty(size, dtype=np.uint8).data
                self.payloads.append(target)
            there = min(size, self._end - self._begin)
            target[:there] = self._start[self._begin : self._begin + there]
            self._begin += there
            if there < size:
                self.missing.append(target[there:])
        if self._begin == self._end:
            self._begin = self._end = 0

    def _make_room(self, needed: int) -> None:
        """Move what is there to the front, in a buffer that can hold `needed` bytes."""
        there = bytes(self._start[self._begin : self._end])
        if needed > len(self._start):
            self._start = memoryview(bytearray(needed))
        self._start[: len(there)] = there
        self._begin, self._end = 0, len(there)

    def be_patient(self) -> None:
        """Have the kernel wake us for many bytes of a payload, for any of a head."""
        lowest = min(len(self.missing[0]), _PATIENT_BYTES) if self.missing else 1
        if lowest != self._lowest and self._is_tcp:
            self.line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowest)
            self._lowest = lowest


def _connected(endpoint: str) -> socket.socket:
    if endpoint.startswith("@"):
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(CONNECT_SECONDS)
        line.connect("\0" + endpoint[1:])
        return line
    address, port = endpoint.rsplit(":", 1)
    return socket.create_connection((address, int(port)), timeout=CONNECT_SECONDS)
