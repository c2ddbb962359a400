"""Parcels by ZeroMQ with CurveZMQ: encrypted, between real hosts."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils import garbage

from paceline.errors import ExchangeError
from paceline.wire.keys import JobKey
from paceline.wire.post import LINGER_SECONDS, Parcel, Post, T

BURST = 64
"""Parcels taken from one socket before the others get their turn."""


class ZeroMqPost(Post[T]):
    """One ROUTER socket where it serves, one DEALER to each server."""

    _open = 0
    """How many there are in this process."""

    def __init__(self, name: str, kind: Any, key: JobKey) -> None:
        super().__init__(name, key)
        ZeroMqPost._open += 1
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self._context = zmq.Context(io_threads=1)
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._known: set[str] = set()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_descriptor, zmq.POLLIN)

    def bind(self, address: str = "") -> str:
        assert address, "inside one host nothing needs encryption"
        socket = self._socket(zmq.ROUTER)
        socket.router_handover = True
        socket.router_mandatory = True
        self._key.protect_server(socket)
        port = socket.bind_to_random_port(f"tcp://{address}")
        self._router = socket
        self._poller.register(socket, zmq.POLLIN)
        return f"tcp://{address}:{port}"

    def connect(self, peer: str, endpoint: str) -> None:
        socket = self._socket(zmq.DEALER)
        socket.routing_id = self.name.encode()
        self._key.protect_client(socket)
        socket.connect(endpoint)
        socket.send(self._key.proof(self.name))
        self._dealers[peer] = socket
        self._poller.register(socket, zmq.POLLIN)

    def close(self) -> None:
        for socket in (self._router, *self._dealers.values()):
            if socket is not None:
                socket.close(linger=round(LINGER_SECONDS * 1000))
        self._context.term()
        os.close(self._wake_descriptor)
        ZeroMqPost._open -= 1
        if ZeroMqPost._open == 0:
            garbage.gc.stop()  # pyzmq's thread that frees what was sent without a copy

    def _send(self, peer: str, messages: Sequence[T], payloads: Sequence[Any]) -> None:
        self._transmit(self._dealers[peer], [self._encoder.encode(messages), *payloads])

    def _reply(self, peer: str, messages: Sequence[T], payloads: Sequence[Any], copy: bool) -> None:
        assert self._router is not None, "a member that does not serve has nobody to reply to"
        frames = [peer.encode(), self._encoder.encode(messages), *payloads]
        with contextlib.suppress(zmq.ZMQError):
            self._transmit(self._router, frames, copy=copy)

    def _receive(self, timeout_seconds: float) -> list[Parcel[T]]:
        parcels: list[Parcel[T]] = []
        for socket, _ in self._poller.poll(max(0, round(timeout_seconds * 1000))):
            if socket == self._wake_descriptor:
                self._awake()
            elif socket is self._router:
                parcels += self._from_router()
            else:
                parcels += self._from_dealer(socket)
        return parcels

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0  # the window of the protocol is the limit
        return socket

    def _transmit(self, socket: "zmq.Socket[bytes]", frames: list[Any], copy: bool = False) -> None:
        socket.send_multipart(frames, copy=copy)
        self.bytes_sent += sum(memoryview(frame).nbytes for frame in frames)

    def _from_router(self) -> list[Parcel[T]]:
        assert self._router is not None
        parcels = []
        for frames in _burst(self._router):
            sender = frames[0].bytes.decode(errors="replace")
            if sender in self._known:
                parcels.append(self._unpack(sender, frames[1:], for_server=True))
            elif len(frames) == 2 and self._key.accepts(sender, frames[1].bytes):
                self._known.add(sender)
            else:
                self.refused += 1
        return parcels

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
