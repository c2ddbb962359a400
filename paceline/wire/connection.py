"""One connection: what is still to be sent, and the packet that is just coming.

A packet on the wire is

    length of the head (4 bytes) | head: sizes of the payloads, messages (msgpack) | payloads
"""

import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic

import numpy as np

from paceline.wire.handshake import Callee, Caller, is_own_user
from paceline.wire.mailbox import T

LENGTH = struct.Struct("<I")
_HEAD_BYTES = 4096
"""Read at once where a head is expected; what it holds of a payload is copied once more."""

LARGEST_HEAD_BYTES = 64 << 20
"""A member never sends more; what announces more is not read."""

_PATIENT_BYTES = 512 << 10
"""A large payload wakes the thread when so much of it has come, not at every packet."""

_LOOPBACK_BYTES = 512 << 10
"""The kernel holds of what is to be sent inside one host: more would fall out of the cores' cache
before it is read. Between hosts the kernel finds what the way needs."""

_UNSENT_BYTES = 256 << 10
"""The kernel holds for another host beyond what is on its way: nothing can overtake it there."""

_BUFFERS_AT_ONCE = 64
CONNECT_SECONDS = 30.0


class Stream(Generic[T]):
    """One connection: what is still to be sent, and the packet that is just coming."""

    def __init__(
        self, line: socket.socket, peer: str, handshake: Caller | Callee, for_server: bool
    ) -> None:
        """`peer` is empty where somebody called, until it has said who it is."""
        self.line, self.peer, self.for_server = line, peer, for_server
        self.handshake = handshake
        self.open = False
        """Both ends have shown that they know the key: packets may go and come."""
        self.closed = False
        self.is_deaf = False
        """The other side takes no more; what it has sent may still be on its way."""
        self.waits = False
        """For the kernel to take more."""
        self.unsent: deque[memoryview | bytes] = deque()
        self.bytes_put = self.bytes_sent = self.bytes_received = 0
        self.tracked: deque[tuple[int, Sequence[T]]] = deque()
        """At how many bytes of `unsent` sent which messages have departed."""
        self.messages: list[T] | None = None
        """Of the packet whose payloads are coming."""
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

    def say(self, head: bytes) -> None:
        """Send a head of the handshake, before all else; an idle line takes so little at once."""
        try:
            self.line.send(LENGTH.pack(len(head)) + head)
        except OSError:
            self.closed = True

    def departed(self) -> Iterator[Sequence[T]]:
        while self.tracked and self.tracked[0][0] <= self.bytes_sent:
            yield self.tracked.popleft()[1]

    def write(self) -> int:
        """Hand the kernel what it takes; returns the bytes."""
        unsent, total = self.unsent, 0
        self.waits = False
        while unsent:
            try:
                if len(unsent) == 1:
                    count = self.line.send(unsent[0])
                else:
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
            if missing:
                count = self.line.recvmsg_into([*missing, room])[0]
            else:
                count = self.line.recv_into(room)
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

    def take_head(self, at_most: int = LARGEST_HEAD_BYTES) -> memoryview | None:
        """The next head, when all of it is there; more than `at_most` bytes close the line. It is
        to be read before more is taken from the kernel."""
        there = self._end - self._begin
        if there == 0:
            self._begin = self._end = 0
            return None
        if there < LENGTH.size:
            self._make_room(LENGTH.size)
            return None
        (length,) = LENGTH.unpack_from(self._start, self._begin)
        if length > at_most:
            self.closed = True
            return None
        if there < LENGTH.size + length:
            self._make_room(LENGTH.size + length)
            return None
        begin = self._begin + LENGTH.size
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


def connected(endpoint: str, seconds: float = CONNECT_SECONDS) -> socket.socket:
    if endpoint.startswith("@"):
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(seconds)
        line.connect("\0" + endpoint[1:])
        tune(line, other="")
        return line
    address, port = endpoint.rsplit(":", 1)
    line = socket.create_connection((address, int(port)), timeout=seconds)
    tune(line, other=line.getpeername()[0])
    return line


def accepted(listener: socket.socket) -> socket.socket:
    """The next one that calls; OSError where there is none, or it has gone again meanwhile."""
    line, address = listener.accept()
    try:
        tune(line, other=address[0] if line.family != socket.AF_UNIX else "")
        if line.family == socket.AF_UNIX and not is_own_user(line):
            raise PermissionError("a process of another user calls")
    except OSError:
        line.close()
        raise
    return line


def tune(line: socket.socket, other: str) -> None:
    """Have the kernel hold no more of what is to be sent than the way to `other` needs."""
    line.setblocking(False)
    if line.family == socket.AF_UNIX:
        return
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if line.getsockname()[0] == other:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BYTES)
    else:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def unacknowledged(line: socket.socket) -> int:
    """Return how many bytes the kernel still has to bring to the other end; 0 within one host."""
    if line.family == socket.AF_UNIX or line.fileno() < 0:
        return 0
    queued: int = struct.unpack("i", fcntl.ioctl(line, termios.TIOCOUTQ, bytes(4)))[0]
    return queued
