"""Packets by ZeroMQ with CurveZMQ: encrypted, between real hosts.

ZeroMQ takes in whoever calls, and keeps it until CurveZMQ has failed. So its connections are
watched here: few may be in the lobby, as at every port, and none of them is read beyond what a
packet may have.
"""

import contextlib
import os
import socket as sockets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import msgspec
import zmq
from zmq.utils import garbage
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import ExchangeError
from paceline.wire.connection import CONNECT_SECONDS
from paceline.wire.handshake import AT_ONCE, HELLO_SECONDS
from paceline.wire.keys import JobKey
from paceline.wire.mailbox import LINGER_SECONDS, Mailbox, Packet, T

BURST = 64
"""Packets taken from one socket before the others get their turn."""

PACKETS_AHEAD = 4
"""Handed to ZeroMQ for one server before it has sent them; the rest waits here."""

_LOOK_SECONDS = 1.0
"""Between two looks at the time, while a server has not let us in."""


@dataclass(slots=True)
class _Line(Generic[T]):
    """The way to one server, and what waits for it."""

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    """Tells when we are let in and when the connection closes."""

    endpoint: str
    is_open: bool = False
    """The server has let us in, and packets may go. Until then ZeroMQ calls again where the
    connection closes."""

    until: float | None = None
    """When we give up, once a connection has closed before we were let in."""

    unsent: deque[tuple[list[Any], Sequence[T] | None]] = field(default_factory=deque)
    """Frames, and the messages to tell of when they depart."""


class ZeroMqMailbox(Mailbox[T]):
    """One ROUTER socket where it serves, one DEALER to each server."""

    _open = 0
    """How many there are in this process."""

    def __init__(self, name: str, kind: Any, key: JobKey) -> None:
        super().__init__(name, key)
        ZeroMqMailbox._open += 1
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self._context = zmq.Context(io_threads=1)
        self._router: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None
        """Where it serves, and what tells there when a connection closes."""
        self._callers: dict[int, str] = {}
        """Descriptor of a connection -> who has shown there that it belongs to the job."""
        self._strangers: dict[int, object] = {}
        """Descriptor of a connection that has shown nothing yet -> the address of its other end."""
        self._servers: dict[str, _Line[T]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._wake_descriptor, zmq.POLLIN)

    def bind(self, address: str = "") -> str:
        assert address, "inside one host nothing needs encryption"
        socket = self._socket(zmq.ROUTER, packets=0)  # it must not wait for a slow worker
        socket.router_handover = True
        socket.router_mandatory = True
        socket.maxmsgsize = self.largest_bytes
        self._key.protect_server(socket)
        monitor = self._watch(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        port = socket.bind_to_random_port(f"tcp://{address}")
        self._router = socket, monitor
        self._poller.register(socket, zmq.POLLIN)
        return f"tcp://{address}:{port}"

    def connect(self, peer: str, endpoint: str) -> None:
        socket = self._socket(zmq.DEALER, PACKETS_AHEAD)
        socket.routing_id = self.name.encode()
        self._key.protect_client(socket)
        monitor = self._watch(socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(endpoint)
        self._servers[peer] = _Line(socket, monitor, endpoint)
        self._poller.register(socket, zmq.POLLIN)

    def close(self) -> None:
        end = time.monotonic() + LINGER_SECONDS
        for line in self._servers.values():
            while line.unsent and not line.is_open and time.monotonic() < end:
                self._greet(line, _milliseconds_until(end))
            with contextlib.suppress(zmq.Again):
                for frames, _ in line.unsent:
                    line.socket.sndtimeo = _milliseconds_until(end)
                    line.socket.send_multipart(frames)
        lines = [(line.socket, line.monitor) for line in self._servers.values()]
        for socket, monitor in lines if self._router is None else [*lines, self._router]:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=_milliseconds_until(end))
        self._context.term()
        os.close(self._wake_descriptor)
        ZeroMqMailbox._open -= 1
        if ZeroMqMailbox._open == 0:
            garbage.gc.stop()  # pyzmq's thread that frees what was sent without a copy

    def send(
        self,
        peer: str,
        messages: Sequence[T],
        payloads: Sequence[Any] = (),
        tracked: bool = False,
    ) -> None:
        line = self._servers[peer]
        frames = [self._encoder.encode(messages), *payloads]
        line.unsent.append((frames, messages if tracked else None))
        if len(line.unsent) == 1 and line.is_open:
            self._go_on(line)

    def _go_on(self, line: _Line[T]) -> None:
        """Send what ZeroMQ takes now; ask to be told when it takes more."""
        while line.unsent:
            frames, tracked = line.unsent[0]
            try:
                self._transmit(line.socket, frames, zmq.NOBLOCK)
            except zmq.Again:
                break
            line.unsent.popleft()
            if tracked is not None:
                self.departed.append(tracked)
        self._poller.modify(line.socket, zmq.POLLIN | (zmq.POLLOUT if line.unsent else 0))

    def reply(
        self, peer: str, messages: Sequence[T], payloads: Sequence[Any] = (), copy: bool = False
    ) -> None:
        assert self._router is not None, "a member that does not serve has nobody to reply to"
        frames = [peer.encode(), self._encoder.encode(messages), *payloads]
        with contextlib.suppress(zmq.ZMQError):
            self._transmit(self._router[0], frames, copy=copy)

    def _receive(self, timeout_seconds: float) -> list[Packet[T]]:
        packets: list[Packet[T]] = []
        if any(line.until is not None for line in self._servers.values()):
            timeout_seconds = min(timeout_seconds, _LOOK_SECONDS)
        ready = dict(self._poller.poll(max(0, round(timeout_seconds * 1000))))
        if self._wake_descriptor in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_descriptor)
        if self._router is not None and (self._router[0] in ready or self._router[1] in ready):
            packets += self._from_router(*self._router)
        for peer, line in self._servers.items():
            events = ready.get(line.socket, 0)
            if not line.is_open:
                if line.socket in ready or line.monitor in ready or line.until is not None:
                    self._greet(line, 0)
                continue
            if events & zmq.POLLOUT:
                self._go_on(line)
            closed = line.monitor in ready and zmq.EVENT_DISCONNECTED in dict(_told(line.monitor))
            if events & zmq.POLLIN or closed:
                taken = _burst(line.socket, all_of_it=closed)
                packets += [self._unpack(peer, frames, for_server=False) for frames in taken]
            if closed:
                self.lost.append(peer)
        return packets

    def _watch(self, socket: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
        """A socket on which it is told what becomes of the other's connections."""
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self._poller.register(monitor, zmq.POLLIN)
        return monitor

    def _greet(self, line: _Line[T], milliseconds: int) -> None:
        """Go on until the server has let us in, which it does by an empty packet."""
        zmq.select([line.monitor, line.socket], [], [], milliseconds / 1000)
        for event, _ in _told(line.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                line.socket.send(self._key.derive(b"member", self.name.encode()))
            elif line.until is None:  # too many called at once, or the server knows another key
                line.until = time.monotonic() + CONNECT_SECONDS
        if line.socket.poll(0):
            line.socket.recv_multipart()
            line.is_open, line.until = True, None
            self._go_on(line)
        elif line.until is not None and time.monotonic() > line.until:
            reason = f"{line.endpoint} does not let {self.name} in"
            raise ExchangeError(f"{reason}; give every host the same PACELINE_KEY.")

    def _watch_door(self, monitor: "zmq.Socket[bytes]") -> list[str]:
        """Note who called and who went; returns the members among those."""
        gone = []
        for event, line in _told(monitor):
            known = self._strangers.pop(line, None) is not None
            if event == zmq.EVENT_DISCONNECTED:
                self.refused += known
                gone.append(self._callers.pop(line, ""))
            else:
                self._strangers[line] = _end_of(line)
        return gone

    def _crowd_out(self) -> None:
        """Of those who have shown nothing yet only a few may stay; the first to come goes first."""
        while len(self._strangers) > AT_ONCE:
            first = next(iter(self._strangers))
            _hang_up(first, self._strangers.pop(first))
            self.refused += 1

    def _socket(self, kind: int, packets: int) -> "zmq.Socket[bytes]":
        """One that takes so many packets before they are sent; 0: any number."""
        socket = self._context.socket(kind)
        socket.sndhwm, socket.rcvhwm = packets, 0
        # Who has called and does not finish the handshake of CurveZMQ goes soon.
        socket.handshake_ivl = round(1000 * HELLO_SECONDS)
        return socket

    def _transmit(
        self, socket: "zmq.Socket[bytes]", frames: list[Any], flags: int = 0, copy: bool = False
    ) -> None:
        socket.send_multipart(frames, flags, copy=copy)
        self.bytes_sent += sum(memoryview(frame).nbytes for frame in frames)

    def _from_router(
        self, router: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]"
    ) -> list[Packet[T]]:
        # Asked first: the descriptor of a connection that has closed may soon be another's.
        gone = self._watch_door(monitor)
        packets = []
        for frames in _burst(router, all_of_it=any(gone)):
            sender, line = frames[0].bytes.decode(errors="replace"), frames[1].get(zmq.SRCFD)
            if len(frames) == 2 and self._is_proof(frames[1].bytes, sender):
                self._callers[line] = sender
                self._strangers.pop(line, None)
                with contextlib.suppress(zmq.ZMQError):
                    router.send_multipart([frames[0], b""])
            elif sender in gone or self._callers.get(line) == sender:
                packets.append(self._unpack(sender, frames[1:], for_server=True))
            else:
                self.refused += 1
        self._crowd_out()  # after all who have shown by now that they are members
        self.lost.extend(filter(None, gone))
        return packets

    def _is_proof(self, said: bytes, sender: str) -> bool:
        """CurveZMQ has let it in, so it knows the key; this shows by which name."""
        return len(said) == 32 and self._key.matches(said, b"member", sender.encode())

    def _unpack(self, peer: str, frames: list[zmq.Frame], *, for_server: bool) -> Packet[T]:
        self.bytes_received += sum(len(frame) for frame in frames)
        try:
            messages = self._decoder.decode(frames[0].buffer)
        except (msgspec.MsgspecError, IndexError) as error:
            raise ExchangeError(f"{self.name} got a packet it cannot read from {peer}.") from error
        return Packet(peer, messages, [frame.buffer for frame in frames[1:]], for_server)


def _milliseconds_until(end: float) -> int:
    return max(0, round(1000 * (end - time.monotonic())))


def _told(monitor: "zmq.Socket[bytes]") -> list[tuple[int, int]]:
    """What happened to which connection, by its descriptor; oldest first."""
    told: list[tuple[int, int]] = []
    while monitor.poll(0):
        message = recv_monitor_message(monitor)
        told.append((message["event"], message["value"]))
    return told


def _end_of(line: int) -> object:
    """The address at the other end of a descriptor; None where it is gone already."""
    try:
        with sockets.socket(fileno=os.dup(line)) as held:
            return held.getpeername()
    except OSError:
        return None


def _hang_up(line: int, end: object) -> None:
    """End the connection with `end`, if it is still the one behind this descriptor of ZeroMQ's.

    ZeroMQ may close it at any time, and the next one may get its number: what is held here cannot
    change any more, so nobody else is hit.
    """
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(line)) as held:
        if end is not None and held.getpeername() == end:
            held.shutdown(sockets.SHUT_RDWR)


def _burst(socket: "zmq.Socket[bytes]", *, all_of_it: bool = False) -> list[list[zmq.Frame]]:
    """What is there now, up to a fair number if not all of it."""
    taken: list[list[zmq.Frame]] = []
    while all_of_it or len(taken) < BURST:
        try:
            taken.append(socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            break
    return taken
