"""A member's mailbox: parcels of typed messages and raw payloads to and from other members.

A parcel is one header (a msgspec list of messages) and the payload frames that go with it. Payloads
leave from the memory they are in and arrive as views of the received frame: nothing is copied here
and nothing is unpickled. A member that serves binds one socket; a worker connects one to each
server. Sockets belong to the thread that calls `receive`; only `wake` may be called from others.
"""

import contextlib
import os
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils import garbage

from paceline.errors import ExchangeError
from paceline.wire.keys import JobKey

T = TypeVar("T")

LINGER_MILLISECONDS = 2000
BURST = 64
"""Parcels taken from one socket before the others get their turn."""


@dataclass(slots=True)
class Parcel(Generic[T]):
    """What arrived, or is to be sent."""

    peer: str
    messages: Sequence[T]
    payloads: Sequence[Any] = field(default_factory=tuple)
    for_server: bool = False
    """Meant for the server's side of the member that receives it."""


class Post(Generic[T]):
    """One member's sockets. `kind` is the type of messages it takes, e.g. `Push | Answer`."""

    _open = 0
    """How many there are in this process."""

    def __init__(self, name: str, kind: Any, key: JobKey, *, encrypt: bool = False) -> None:
        Post._open += 1
        self.name = name
        self.refused = 0
        """Parcels from strangers, thrown away."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self._key, self._encrypt = key, encrypt
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self._context = zmq.Context(io_threads=1)
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._known: set[bytes] = set()
        self._local: deque[Parcel[T]] = deque()
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_descriptor, zmq.POLLIN)

    def bind(self, address: str = "") -> str:
        """Start to serve; returns the endpoint to tell the others.

        Without an address it is a socket of this host without a file: nothing stays behind, even
        after kill -9. Who may talk is decided by the key, as everywhere.
        """
        socket = self._socket(zmq.ROUTER)
        socket.router_handover = True
        socket.router_mandatory = True
        if address:
            if self._encrypt:
                self._key.protect_server(socket)
            port = socket.bind_to_random_port(f"tcp://{address}")
            endpoint = f"tcp://{address}:{port}"
        else:
            endpoint = f"ipc://@paceline-{secrets.token_hex(16)}"
            socket.bind(endpoint)
        self._router = socket
        self._poller.register(socket, zmq.POLLIN)
        return endpoint

    def connect(self, peer: str, endpoint: str) -> None:
        """Open the way to a serving member and show that we belong to the job."""
        socket = self._socket(zmq.DEALER)
        socket.routing_id = self.name.encode()
        if self._encrypt and endpoint.startswith("tcp:"):
            self._key.protect_client(socket)
        socket.connect(endpoint)
        socket.send(self._key.proof(self.name))
        self._dealers[peer] = socket
        self._poller.register(socket, zmq.POLLIN)

    def send(self, peer: str, messages: Sequence[T], payloads: Sequence[Any] = ()) -> None:
        """To the server's side of `peer`, from a worker's."""
        if peer == self.name:
            self._local.append(Parcel(peer, messages, payloads, for_server=True))
            return
        self._transmit(self._dealers[peer], [self._encoder.encode(messages), *payloads])

    def reply(
        self, peer: str, messages: Sequence[T], payloads: Sequence[Any] = (), copy: bool = False
    ) -> None:
        """To the worker's side of `peer`, from a server's; `copy` when memory may change soon."""
        if peer == self.name:
            self._local.append(Parcel(peer, messages, payloads))
            return
        assert self._router is not None, "a member that does not serve has nobody to reply to"
        frames = [peer.encode(), self._encoder.encode(messages), *payloads]
        # A worker that is gone is the launcher's affair; what was meant for it is dropped.
        with contextlib.suppress(zmq.ZMQError):
            self._transmit(self._router, frames, copy=copy)

    def receive(self, timeout_seconds: float) -> list[Parcel[T]]:
        """Wait for parcels or a wake-up; returns what has come, possibly nothing."""
        milliseconds = 0 if self._local else max(0, round(timeout_seconds * 1000))
        ready = self._poller.poll(milliseconds)
        parcels = list(self._local)
        self._local.clear()
        for socket, _ in ready:
            if socket == self._wake_descriptor:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_descriptor)
            elif socket is self._router:
                parcels += self._from_router()
            else:
                parcels += self._from_dealer(socket)
        return parcels

    def wake(self) -> None:
        """Make `receive` return soon; from any thread."""
        os.eventfd_write(self._wake_descriptor, 1)

    def close(self) -> None:
        for socket in (self._router, *self._dealers.values()):
            if socket is not None:
                socket.close(linger=LINGER_MILLISECONDS)
        self._context.term()
        os.close(self._wake_descriptor)
        Post._open -= 1
        if Post._open == 0:
            garbage.gc.stop()  # pyzmq's thread that frees what was sent without a copy

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0  # the window of the protocol is the limit
        socket.linger = LINGER_MILLISECONDS
        return socket

    def _transmit(self, socket: "zmq.Socket[bytes]", frames: list[Any], copy: bool = False) -> None:
        socket.send_multipart(frames, copy=copy)
        self.bytes_sent += sum(memoryview(frame).nbytes for frame in frames)

    def _from_router(self) -> list[Parcel[T]]:
        assert self._router is not None
        parcels = []
        for frames in _burst(self._router):
            sender = frames[0].bytes
            if sender in self._known:
                parcels.append(self._unpack(sender.decode(), frames[1:], for_server=True))
            elif len(frames) == 2 and self._accepts(sender, frames[1].bytes):
                self._known.add(sender)
            else:
                self.refused += 1
        return parcels

    def _accepts(self, sender: bytes, proof: bytes) -> bool:
        try:
            return self._key.accepts(sender.decode(), proof)
        except UnicodeDecodeError:
            return False

    def _from_dealer(self, socket: "zmq.Socket[bytes]") -> list[Parcel[T]]:
        peer = next(name for name, dealer in self._dealers.items() if dealer is socket)
        return [self._unpack(peer, frames, for_server=False) for frames in _burst(socket)]

    def _unpack(self, peer: str, frames: list[zmq.Frame], *, for_server: bool) -> Parcel[T]:
        self.bytes_received += sum(len(frame) for frame in frames)
        try:
            messages = self._decoder.decode(frames[0].buffer)
        except (msgspec.MsgspecError, IndexError) as error:
            raise ExchangeError(f"{self.name} got a parcel it cannot read from {peer}.") from error
        return Parcel(peer, messages, [frame.buffer for frame in frames[1:]], for_server)


def _burst(socket: "zmq.Socket[bytes]") -> list[list[zmq.Frame]]:
    """What is there now, up to a fair number."""
    taken: list[list[zmq.Frame]] = []
    while len(taken) < BURST:
        try:
            taken.append(socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            break
    return taken
