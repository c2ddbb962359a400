"""Parcels by ZeroMQ with CurveZMQ: encrypted, between real hosts."""

import contextlib
import os
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
from paceline.wire.handshake import HELLO_SECONDS
from paceline.wire.keys import JobKey
from paceline.wire.post import LINGER_SECONDS, Parcel, Post, T

BURST = 64
"""Parcels taken from one socket before the others get their turn."""


PARCELS_AHEAD = 4
"""Handed to ZeroMQ for one server before it has sent them; the rest waits here."""


@dataclass(slots=True)
class _Line(Generic[T]):
    """The way to one server, and what waits for it."""

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    """Tells when the connection closes."""

    unsent: deque[tuple[list[Any], Sequence[T] | None]] = field(default_factory=deque)
    """Frames, and the messages to tell of when they depart."""


class ZeroMqPost(Post[T]):
    """One ROUTER socket where it serves, one DEALER to each server."""

    _open = 0
    """How many there are in this process."""

    def __init__(self, name: str, kind: Any, key: JobKey) -> None:
        super().__init__(name, key)
        ZeroMqPost._open += 1
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self._context = zmq.Context(io_threads=1)
        self._router: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None
        """Where it serves, and what tells there when a connection closes."""
        self._callers: dict[int, str] = {}
        """Descriptor of a connection -> who has shown there that it belongs to the job."""
        self._servers: dict[str, _Line[T]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._wake_descriptor, zmq.POLLIN)

    def bind(self, address: str = "") -> str:
        assert address, "inside one host nothing needs encryption"
        socket = self._socket(zmq.ROUTER, parcels=0)  # it must not wait for a slow worker
        socket.router_handover = True
        socket.router_mandatory = True
        self._key.protect_server(socket)
        port = socket.bind_to_random_port(f"tcp://{address}")
        self._router = socket, self._watch(socket)
        self._poller.register(socket, zmq.POLLIN)
        return f"tcp://{address}:{port}"

    def connect(self, peer: str, endpoint: str) -> None:
        socket = self._socket(zmq.DEALER, PARCELS_AHEAD)
        socket.routing_id = self.name.encode()
        self._key.protect_client(socket)
        monitor = self._watch(socket)
        socket.connect(endpoint)
        socket.send(self._key.derive(b"member", self.name.encode()))
        self._servers[peer] = _Line(socket, monitor)
        self._poller.register(socket, zmq.POLLIN)

    def close(self) -> None:
        end = time.monotonic() + LINGER_SECONDS
        for line in self._servers.values():
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
        ZeroMqPost._open -= 1
        if ZeroMqPost._open == 0:
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
        if len(line.unsent) == 1:
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

    def _receive(self, timeout_seconds: float) -> list[Parcel[T]]:
        parcels: list[Parcel[T]] = []
        ready = dict(self._poller.poll(max(0, round(timeout_seconds * 1000))))
        if self._wake_descriptor in ready:
            self._awake()
        if self._router is not None and (self._router[0] in ready or self._router[1] in ready):
            parcels += self._from_router(*self._router)
        for peer, line in self._servers.items():
            events = ready.get(line.socket, 0)
            if events & zmq.POLLOUT:
                self._go_on(line)
            closed = line.monitor in ready and bool(_closed(line.monitor))
            if events & zmq.POLLIN or closed:
                taken = _burst(line.socket, all_of_it=closed)
                parcels += [self._unpack(peer, frames, for_server=False) for frames in taken]
            if closed:
                self.lost.append(peer)
        return parcels

    def _watch(self, socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
        """A socket on which the closing of the other's connections is told."""
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller.register(monitor, zmq.POLLIN)
        return monitor

    def _socket(self, kind: int, parcels: int) -> "zmq.Socket[bytes]":
        """One that takes so many parcels before they are sent; 0: any number."""
        socket = self._context.socket(kind)
        socket.sndhwm, socket.rcvhwm = parcels, 0
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
    ) -> list[Parcel[T]]:
        # Asked first: the descriptor of a connection that has closed may soon be another's.
        gone = [self._callers.pop(line, "") for line in _closed(monitor)]
        parcels = []
        for frames in _burst(router, all_of_it=any(gone)):
            sender, line = frames[0].bytes.decode(errors="replace"), frames[1].get(zmq.SRCFD)
            if sender in gone or self._callers.get(line) == sender:
                parcels.append(self._unpack(sender, frames[1:], for_server=True))
            elif len(frames) == 2 and self._is_proof(frames[1].bytes, sender):
                self._callers[line] = sender
            else:
                self.refused += 1
        self.lost.extend(filter(None, gone))
        return parcels

    def _is_proof(self, said: bytes, sender: str) -> bool:
        """CurveZMQ has let it in, so it knows the key; this shows by which name."""
        return self._key.matches(said, b"member", sender.encode())

    def _unpack(self, peer: str, frames: list[zmq.Frame], *, for_server: bool) -> Parcel[T]:
        self.bytes_received += sum(len(frame) for frame in frames)
        try:
            messages = self._decoder.decode(frames[0].buffer)
        except (msgspec.MsgspecError, IndexError) as error:
            raise ExchangeError(f"{self.name} got a parcel it cannot read from {peer}.") from error
        return Parcel(peer, messages, [frame.buffer for frame in frames[1:]], for_server)


def _milliseconds_until(end: float) -> int:
    return max(0, round(1000 * (end - time.monotonic())))


def _closed(monitor: "zmq.Socket[bytes]") -> list[int]:
    """The descriptors of the connections that have closed."""
    closed: list[int] = []
    while monitor.poll(0):
        closed.append(recv_monitor_message(monitor)["value"])
    return closed


def _burst(socket: "zmq.Socket[bytes]", *, all_of_it: bool = False) -> list[list[zmq.Frame]]:
    """What is there now, up to a fair number if not all of it."""
    taken: list[list[zmq.Frame]] = []
    while all_of_it or len(taken) < BURST:
        try:
            taken.append(socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            break
    return taken
