"""A channel for a thread that talks with one other member and waits for each answer."""

import select
import socket
import time

from paceline.errors import ExchangeError
from paceline.wire.channel import LARGEST_HEAD_BYTES, Channel
from paceline.wire.handshake import Initiator
from paceline.wire.keys import JobKey
from paceline.wire.sockets import CONNECT_SECONDS, connected

AGAIN_SECONDS = 0.1
PATIENCE_SECONDS = 10.0
"""For one handshake: a listener under a flood may never come to it, and it is called again."""


class BlockingChannel:
    """Whole messages, one after the other. Raises TimeoutError after the deadline (a reading of
    `time.monotonic`), another OSError when the other end has closed the connection, and
    ExchangeError when it does not prove that it is a member."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @classmethod
    def connect(
        cls,
        endpoint: str,
        key: JobKey,
        own: str,
        peer: str,
        *,
        encrypted: bool,
        deadline: float,
        largest_head: int = LARGEST_HEAD_BYTES,
    ) -> "BlockingChannel":
        connection = connected(endpoint, _left(deadline, at_most=CONNECT_SECONDS))
        channel = Channel(connection, Initiator(key, own, peer, encrypted), largest_head)
        opened = cls(channel)
        try:
            opened._authenticate(endpoint, own, min(deadline, time.monotonic() + PATIENCE_SECONDS))
        except BaseException:
            opened.close()
            raise
        return opened

    @classmethod
    def reach(
        cls,
        endpoint: str,
        key: JobKey,
        own: str,
        peer: str,
        *,
        encrypted: bool,
        deadline: float,
        patient: bool = True,
        largest_head: int = LARGEST_HEAD_BYTES,
    ) -> "BlockingChannel":
        """As `connect`, again and again until the deadline: a crowd of callers may have pushed this
        one out, and if `patient`, nothing may listen there yet."""
        while True:
            try:
                return cls.connect(
                    endpoint,
                    key,
                    own,
                    peer,
                    encrypted=encrypted,
                    deadline=deadline,
                    largest_head=largest_head,
                )
            except OSError as error:
                refused = isinstance(error, ConnectionRefusedError | socket.gaierror)
                if time.monotonic() >= deadline or (refused and not patient):
                    raise
            time.sleep(AGAIN_SECONDS)

    @property
    def peer(self) -> str:
        return self._channel.peer

    @property
    def socket(self) -> socket.socket:
        """The connection itself, for measurements between two messages."""
        return self._channel.socket

    def send(self, message: bytes, deadline: float) -> None:
        channel = self._channel
        channel.put(message)
        while channel.unsent:
            channel.write()
            if channel.is_deaf:
                raise ConnectionResetError(f"{channel.peer} has closed the connection")
            if channel.unsent:
                self._wait(select.POLLOUT, deadline)

    def receive(self, deadline: float) -> bytes:
        channel, more = self._channel, True
        while (head := channel.take_head()) is None:
            if channel.closed:
                self._raise_closed()
            if not more:
                self._wait(select.POLLIN, deadline)
            more = channel.fill()
        return bytes(head)

    def close(self) -> None:
        self._channel.close()

    def _authenticate(self, endpoint: str, own: str, deadline: float) -> None:
        channel = self._channel
        while not channel.is_open:
            self._wait(select.POLLIN, deadline)
            channel.authenticate()
            if channel.is_refused:
                raise not_a_member(channel, own, endpoint)
            if channel.closed:
                self._raise_closed()

    def _wait(self, events: int, deadline: float) -> None:
        waiting = select.poll()
        waiting.register(self._channel.socket, events)
        if not waiting.poll(max(1, round(1000 * (deadline - time.monotonic())))):
            raise TimeoutError(f"{self._channel.peer} does not answer")

    def _raise_closed(self) -> None:
        channel = self._channel
        if channel.why:
            raise ExchangeError(f"the connection to {channel.peer} was closed: {channel.why}.")
        raise ConnectionResetError(f"{channel.peer} has closed the connection")


def not_a_member(channel: Channel, own: str, endpoint: str) -> ExchangeError:
    """The other end proved nothing, or refused our proof."""
    if channel.why:
        return ExchangeError(f"what listens at {endpoint} is not {channel.peer} of this job.")
    reason = f"{own} and {channel.peer} at {endpoint} do not know the same key"
    return ExchangeError(f"{reason}; give every host the same PACELINE_KEY.")


def _left(deadline: float, at_most: float) -> float:
    return min(at_most, max(0.001, deadline - time.monotonic()))
