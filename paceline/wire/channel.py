"""One authenticated connection: the handshake, then messages and payloads, both ways.

A message on a plain connection is

    length of the head (4 bytes) | head | payloads

and on an encrypted one the same in records (`encryption.py`). Payloads go to the kernel from the
memory they are in and come into the memory where they belong. Nothing here waits: a mailbox and a
listener watch many channels; `BlockingChannel` is for a thread that talks with one other member.
"""

import socket
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from paceline.errors import ExchangeError
from paceline.wire.encryption import Opener, Sealer
from paceline.wire.handshake import HELLO_BYTES, Initiator, Responder

LENGTH = struct.Struct("<I")
_HEAD_BYTES = 4096
"""Read at once where a head is expected; what it holds of a payload is copied once more."""

_KEPT_BYTES = 1 << 20
"""A buffer that grew beyond this for one head is given back."""

LARGEST_HEAD_BYTES = 64 << 20
"""A member never sends more; what announces more is not read."""

_PATIENT_BYTES = 512 << 10
"""A large payload wakes the thread when this much of it has come, not at every packet."""

_BUFFERS_AT_ONCE = 64


class Channel:
    """One connection: what is still to be sent, and the message that is just coming."""

    def __init__(
        self,
        connection: socket.socket,
        handshake: Initiator | Responder,
        largest_head: int = LARGEST_HEAD_BYTES,
        largest_payload: int = LARGEST_HEAD_BYTES,
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.peer = handshake.peer
        """The other end's name; empty if it called and is not authenticated yet."""
        self.is_caller = isinstance(handshake, Initiator)
        self.is_open = False
        """Both ends have proved that they know the key: messages may go and come."""
        self.is_refused = False
        """The other end did not prove it."""
        self.closed = False
        self.why = ""
        """Why it was closed, if this end closed it."""
        self.is_deaf = False
        """The other side takes no more; what it has sent may still be in flight."""
        self.waits = False
        """For the kernel to take more."""
        self.unsent: deque[memoryview | bytes] = deque()
        self.bytes_put = self.bytes_departed = self.bytes_received = 0
        """Without what the handshake and encryption add, except for those received."""
        self.tracked: deque[tuple[int, Any]] = deque()
        """For the mailbox: after how many departed bytes which messages have departed."""
        self.messages: Any = None
        """For the mailbox: the messages whose payloads are coming."""
        self.payloads: list[memoryview | None] = []
        self.missing: deque[memoryview] = deque()
        """The parts of the payloads that have not come, in order."""
        self._handshake = handshake
        self._largest_head, self._largest_payload = largest_head, largest_payload
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._sealed = 0
        """Content of the records that stand first in `unsent`."""
        self._start = memoryview(bytearray(_HEAD_BYTES))
        self._begin = self._end = 0
        self._lowest = 1
        self._is_tcp = connection.family != socket.AF_UNIX
        if isinstance(handshake, Responder):
            self._say(handshake.challenge)

    def close(self) -> None:
        self.closed = True
        self.socket.close()

    def authenticate(self) -> None:
        """Continue the handshake as far as what has come allows."""
        handshake = self._handshake
        while not self.is_open and not self.closed:
            message = self.take_head(HELLO_BYTES)
            if message is None:
                if not self._fill_exactly():
                    break
                continue
            answer = handshake.answer(bytes(message))
            if answer is not None:
                self._say(answer)
            if handshake.refused:
                self.closed = True
            elif handshake.done:
                self.is_open, self.peer = True, handshake.peer
                if handshake.keys is not None:
                    self._sealer = Sealer(handshake.keys.send)
                    self._opener = Opener(handshake.keys.receive)
        self.is_refused = handshake.refused or bool(self.why)

    def _say(self, message: bytes) -> None:
        """Send a message of the handshake; an idle connection takes it at once."""
        try:
            self.socket.send(LENGTH.pack(len(message)) + message)
        except OSError:
            self.closed = True

    def put(self, head: bytes, payloads: Sequence[memoryview] = ()) -> None:
        """Append a message to what is still to be sent."""
        if len(head) > self._largest_head:
            limit = f"{len(head)} bytes; at most {self._largest_head} fit"
            raise ExchangeError(f"a message to {self.peer} has {limit}.")
        parts: list[memoryview | bytes] = [LENGTH.pack(len(head)) + head, *payloads]
        self.unsent.extend(parts)
        self.bytes_put += sum(map(len, parts))

    def write(self) -> int:
        """Hand the kernel what it takes; returns the bytes."""
        if self._sealer is not None:
            return self._write_sealed(self._sealer)
        unsent, total = self.unsent, 0
        self.waits = False
        while unsent:
            try:
                if len(unsent) == 1:
                    count = self.socket.send(unsent[0])
                else:
                    count = self.socket.sendmsg(islice(unsent, _BUFFERS_AT_ONCE))
            except BlockingIOError:
                self.waits = True
                break
            except OSError:  # its last words are read before it is dropped
                self._go_deaf()
                break
            total += count
            while unsent and count >= len(unsent[0]):
                count -= len(unsent.popleft())
            if count:  # it took a part, so it has no more room
                unsent[0] = unsent[0][count:]
                self.waits = True
                break
        self.bytes_departed += total
        return total

    def _write_sealed(self, sealer: Sealer) -> int:
        unsent, total = self.unsent, 0
        self.waits = False
        while unsent:
            if not self._sealed:
                records, self._sealed = sealer.seal(unsent)
                unsent.appendleft(records)
            try:
                count = self.socket.send(unsent[0])
            except BlockingIOError:
                self.waits = True
                break
            except OSError:
                self._go_deaf()
                break
            total += count
            if count < len(unsent[0]):
                unsent[0] = unsent[0][count:]
                self.waits = True
                break
            unsent.popleft()
            self.bytes_departed += self._sealed
            self._sealed = 0
        return total

    def _go_deaf(self) -> None:
        self.is_deaf = True
        self.unsent.clear()

    @property
    def has_record(self) -> bool:
        """More can be read without the kernel."""
        return self._opener is not None and self._opener.has_record

    def fill(self) -> bool:
        """Take once from the kernel: the missing parts of payloads, and what follows them into the
        buffer for heads. False if there is no more for now."""
        if self._opener is not None:
            return self._fill_sealed(self._opener)
        missing, room = self.missing, self._start[self._end :]
        try:
            if missing:
                count = self.socket.recvmsg_into([*missing, room])[0]
            else:
                count = self.socket.recv_into(room)
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

    def _fill_sealed(self, opener: Opener) -> bool:
        """Decrypt up to the end of the payloads or of one head, which says what follows it."""
        is_full = True
        if not opener.has_record:
            room = opener.free()
            count = self._receive(room)
            opener.took(count)
            is_full = count == len(room)
        try:
            while self.missing and opener.has_record:
                self._open_payload(opener)
            if not self.missing and opener.has_record:
                size = opener.next_size()
                self._make_room(self._end - self._begin + size)
                opener.open(self._start[self._end : self._end + size])
                self._end += size
        except ValueError as error:
            self.closed, self.why = True, f"{error}"
        return is_full or opener.has_record

    def _open_payload(self, opener: Opener) -> None:
        target, size = self.missing[0], opener.next_size()
        if size > len(target):
            raise ValueError("a record is longer than the payload it belongs to")
        opener.open(target[:size])
        if size == len(target):
            self.missing.popleft()
        else:
            self.missing[0] = target[size:]

    def _fill_exactly(self) -> bool:
        """Take no more than the next message of the handshake: what follows is not for it."""
        there = self._end - self._begin
        wanted = LENGTH.size - there
        if wanted <= 0:
            wanted += LENGTH.unpack_from(self._start, self._begin)[0]
        count = self._receive(self._start[self._end : self._end + wanted])
        self._end += count
        return count > 0

    def _receive(self, room: memoryview) -> int:
        """Take once from the kernel; returns how many bytes, 0 if there are none for now."""
        try:
            count = self.socket.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        self.closed = count == 0
        self.bytes_received += count
        return count

    def take_head(self, at_most: int = 0) -> memoryview | None:
        """Return the next head once all of it is there; a longer one closes the connection. It must
        be read before more is taken from the kernel."""
        there = self._end - self._begin
        if there == 0:
            self._begin = self._end = 0
            if len(self._start) > _KEPT_BYTES:
                self._start = memoryview(bytearray(_HEAD_BYTES))
            return None
        if there < LENGTH.size:
            self._make_room(LENGTH.size)
            return None
        (length,) = LENGTH.unpack_from(self._start, self._begin)
        if length > (at_most or self._largest_head):
            self.closed, self.why = True, f"a message of {length} bytes was announced"
            return None
        if there < LENGTH.size + length:
            self._make_room(LENGTH.size + length)
            return None
        begin = self._begin + LENGTH.size
        self._begin = begin + length
        return self._start[begin : self._begin]

    def expect(self, sizes: Sequence[int], place: memoryview | None) -> None:
        """Payloads of these sizes follow; the first belongs into `place` if it has its size."""
        self.payloads = []
        for number, size in enumerate(sizes):
            if not 0 <= size <= self._largest_payload:
                self.closed, self.why = True, f"a payload of {size} bytes was announced"
                return
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
        """Have a buffer in which `needed` bytes fit behind the first one that is not read."""
        if len(self._start) - self._begin >= needed:
            return
        there = bytes(self._start[self._begin : self._end])
        if needed > len(self._start):
            self._start = memoryview(bytearray(needed))
        self._start[: len(there)] = there
        self._begin, self._end = 0, len(there)

    def be_patient(self) -> None:
        """Have the kernel wake us for many bytes of a payload, and for any of a head."""
        lowest = 1
        if self.missing:
            held = 0 if self._opener is None else self._opener.held
            lowest = max(1, min(len(self.missing[0]) - held, _PATIENT_BYTES))
        if lowest != self._lowest and self._is_tcp:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowest)
            self._lowest = lowest
