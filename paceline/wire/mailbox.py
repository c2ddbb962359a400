"""A member's mailbox: packets of typed messages and raw payloads to and from other members.

A packet is a list of messages (msgspec) and the raw payloads that go with them. Payloads leave from
the memory they are in, and nothing is unpickled. A member that serves binds; a worker connects to
each server. A mailbox belongs to the thread that receives; only `wake` may be called from others.

There are two: `StreamMailbox` on plain sockets, and `ZeroMqMailbox`, which encrypts.
"""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from paceline.wire.keys import JobKey

T = TypeVar("T")

LINGER_SECONDS = 2.0
"""How long `close` waits for what is still to be sent."""


@dataclass(slots=True)
class Packet(Generic[T]):
    """What arrived, or is to be sent."""

    peer: str
    messages: Sequence[T]
    payloads: Sequence[Any] = field(default_factory=tuple)
    """None in place of a payload that was received into its place (see `Mailbox.place`)."""

    for_server: bool = False
    """Meant for the server's side of the member that receives it."""


class Mailbox(ABC, Generic[T]):
    """One member's sockets. Each kind is made with the type of messages it takes, e.g.
    `Push | Answer`."""

    def __init__(self, name: str, key: JobKey) -> None:
        self.name = name
        self.refused = 0
        """Packets from strangers, thrown away."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.largest_bytes = 64 << 20
        """Of a payload, set before `bind`: what announces more is not read."""
        self.place: Callable[[Sequence[T]], memoryview | None] = lambda messages: None
        """Where the first payload of a packet with these messages belongs, if that is known before
        it has come; a mailbox that can receives it there."""
        self.departed: deque[Sequence[T]] = deque()
        """The messages of `tracked` packets that the network has taken, in that order, for the
        receiving thread to empty."""
        self.lost: deque[str] = deque()
        """Members whose connection has closed, for the receiving thread to empty: all that they had
        sent and will ever arrive has been received before."""
        self._key = key
        self._encoder = msgspec.msgpack.Encoder()
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @abstractmethod
    def bind(self, address: str = "") -> str:
        """Start to serve; returns the endpoint to tell the others.

        Without an address it is a socket of this host without a file: nothing stays behind, even
        after kill -9. Who may talk is decided by the key, as everywhere.
        """

    @abstractmethod
    def connect(self, peer: str, endpoint: str) -> None:
        """Open the way to a serving member and show that we belong to the job."""

    @abstractmethod
    def send(
        self,
        peer: str,
        messages: Sequence[T],
        payloads: Sequence[Any] = (),
        tracked: bool = False,
    ) -> None:
        """To the server's side of `peer`, from a worker's; `tracked`: see `departed`.

        Here and below: what is meant for one who is gone is dropped, and `lost` names it.
        """

    @abstractmethod
    def reply(
        self, peer: str, messages: Sequence[T], payloads: Sequence[Any] = (), copy: bool = False
    ) -> None:
        """To the worker's side of `peer`, from a server's; `copy` when memory may change soon."""

    def receive(self, timeout_seconds: float) -> list[Packet[T]]:
        """Wait for packets, departures, losses or a wake-up; returns the packets, if any came."""
        told = self.departed or self.lost
        return self._receive(0.0 if told else timeout_seconds)

    def wake(self) -> None:
        """Make `receive` return soon; from any thread."""
        os.eventfd_write(self._wake_descriptor, 1)

    @abstractmethod
    def close(self) -> None:
        """Send what is still to be sent, for `LINGER_SECONDS` at most, and close the sockets."""

    @abstractmethod
    def _receive(self, timeout_seconds: float) -> list[Packet[T]]: ...
