"""A member's mailbox: packets of typed messages and raw payloads to and from other members.

A packet is a list of messages (msgspec) and the raw payloads that go with them; nothing is
unpickled. A member that serves listens, and a worker connects to each server. A mailbox belongs to
the thread that receives; only `wake` may be called from others.
"""

import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from paceline.errors import ExchangeError
from paceline.wire.blocking import AGAIN_SECONDS, not_a_member
from paceline.wire.channel import LARGEST_HEAD_BYTES, Channel
from paceline.wire.handshake import Initiator
from paceline.wire.keys import JobKey
from paceline.wire.listener import ChannelListener
from paceline.wire.sockets import CONNECT_SECONDS, bound_buffers, connected, listen, unacknowledged

T = TypeVar("T")

LINGER_SECONDS = 2.0
"""How long `close` waits for what is still to be sent."""

_DRAIN_SECONDS = 0.005
"""Between two looks whether the kernel has sent everything."""

_TURN_BYTES = 8 << 20
"""Read from one connection before the others get their turn."""


@dataclass(slots=True)
class Packet(Generic[T]):
    """Messages that arrived, or that are to be sent."""

    peer: str
    messages: Sequence[T]
    payloads: Sequence[Any] = field(default_factory=tuple)
    """None in place of a payload that was received into its place (see `Mailbox.receive`)."""

    for_server: bool = False
    """Meant for the server's side of the member that receives it: it goes through the connection
    that the sender opened. Otherwise it goes to the worker's side, which opened the connection."""


@dataclass(slots=True, frozen=True)
class Closed:
    """A member's connection has closed; all that it had sent and will ever arrive came before."""

    peer: str
    why: str = ""
    """Why this end closed it; empty if the other one did."""


Place = Callable[[Any], memoryview | None]
"""Where the first payload of a packet with these messages belongs, if that is known before it has
come. It is received there, and the memory is worthless until the packet has arrived."""


@dataclass(slots=True)
class _Call:
    """A server that is not authenticated yet."""

    endpoint: str
    until: float | None = None
    """When we give up, once the connection was lost. A silent one may still be getting ready."""

    again_at: float | None = None
    """When to call again, after the connection was lost."""


class Mailbox(Generic[T]):
    """One connection to each member it talks with."""

    def __init__(
        self,
        name: str,
        message_type: Any,
        key: JobKey,
        *,
        encrypted: bool = False,
        largest_head: int = LARGEST_HEAD_BYTES,
        largest_payload: int = LARGEST_HEAD_BYTES,
    ) -> None:
        """`message_type` is a union such as `Push | Answer`. More than `largest_head` bytes of
        messages, or `largest_payload` of one payload, close the connection that announces them."""
        self.name = name
        self.bytes_sent = self.bytes_received = 0
        self._key, self._encrypted = key, encrypted
        self._largest_head, self._largest_payload = largest_head, largest_payload
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(tuple[list[int], list[message_type]])
        self._listener: ChannelListener | None = None
        self._servers: dict[str, Channel] = {}
        self._workers: dict[str, Channel] = {}
        self._channels: dict[int, Channel] = {}
        self._calls: dict[str, _Call] = {}
        self._arrived: list[Packet[T] | Closed] = []
        """To be returned by `receive`."""
        self._departed: list[Sequence[T]] = []
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        # Reported once for each time that it is written to: there is no need to read it.
        self._poll.register(self._wake_descriptor, select.EPOLLIN | select.EPOLLET)

    @property
    def refused(self) -> int:
        """Calls by peers that were not authenticated."""
        return 0 if self._listener is None else self._listener.refused

    @property
    def has_workers(self) -> bool:
        """A member that called is connected."""
        return bool(self._workers)

    def listen(self, where: str | socket.socket = "") -> str:
        """Start to serve at a socket that listens, or at an address (see `sockets.listen`).

        Returns the endpoint to tell the others. By default it is a socket of this host without a
        file: nothing stays behind, even after kill -9.
        """
        listener, endpoint = (where, "") if isinstance(where, socket.socket) else listen(where)
        self._listener = ChannelListener(
            listener,
            self._key,
            self.name,
            encrypted=self._encrypted,
            largest_head=self._largest_head,
            largest_payload=self._largest_payload,
        )
        self._poll.register(self._listener, select.EPOLLIN)
        return endpoint

    def connect(self, peer: str, endpoint: str) -> None:
        """Open the way to a serving member and prove that we belong to the job."""
        self._calls[peer] = _Call(endpoint)
        self._servers[peer] = self._call(peer, endpoint, CONNECT_SECONDS)

    def send(self, packet: Packet[T], *, copied: bool = False, tracked: bool = False) -> None:
        """Send a packet, or drop it if its peer is gone, which `receive` reports.

        The payloads must not change until the packet has departed, unless it is `copied`;
        `departures` reports the messages of a `tracked` one.
        """
        peers = self._servers if packet.for_server else self._workers
        peer = peers.get(packet.peer)
        if peer is None or peer.is_deaf or (peer.closed and packet.peer not in self._calls):
            return
        views = [memoryview(payload).cast("B") for payload in packet.payloads]
        head = self._encoder.encode(([len(view) for view in views], packet.messages))
        is_idle = peer.is_open and not peer.unsent
        peer.put(head, views)
        if tracked:
            peer.tracked.append((peer.bytes_put, packet.messages))
        if is_idle:
            self._write(peer)
        if copied:
            unsent = peer.unsent
            for place in range(-min(len(views), len(unsent)), 0):
                unsent[place] = bytes(unsent[place])

    def receive(
        self, timeout_seconds: float, place: Place | None = None
    ) -> list[Packet[T] | Closed]:
        """Wait for packets, closed connections, departures or a wake-up; return the first two."""
        if self._arrived or self._departed:
            timeout_seconds = 0.0
        unsettled, listener = bool(self._calls), self._listener
        if unsettled:
            timeout_seconds = min(timeout_seconds, AGAIN_SECONDS)
        is_called = listener is not None and listener.is_busy
        if listener is not None and is_called:
            timeout_seconds = listener.timeout(timeout_seconds)
        for descriptor, events in self._poll.poll(max(0.0, timeout_seconds)):
            channel = self._channels.get(descriptor)
            if channel is not None:
                if events & select.EPOLLOUT:
                    self._write(channel)
                if events & ~select.EPOLLOUT and not channel.closed:
                    self._read(channel, place)
            elif descriptor != self._wake_descriptor:
                is_called = True
        if listener is not None and is_called:
            self._welcome(listener)
        if unsettled:  # after all that came in time was read
            self._call_again()
        arrived, self._arrived = self._arrived, []
        return arrived

    def departures(self) -> list[Sequence[T]]:
        """Return the messages of tracked packets that the network has taken since the last call."""
        departed, self._departed = self._departed, []
        return departed

    def wake(self) -> None:
        """Make `receive` return soon; from any thread."""
        os.eventfd_write(self._wake_descriptor, 1)

    def close(self) -> None:
        """Send what is still to be sent, for `LINGER_SECONDS` at most, and close the sockets."""
        end = time.monotonic() + LINGER_SECONDS
        # What others still send is not read any more, except for the handshake.
        waiting = select.poll()
        for channel in self._channels.values():
            if channel.unsent:
                waiting.register(channel.socket, _awaited(channel))
        while any(c.unsent for c in self._channels.values()) and time.monotonic() < end:
            for descriptor, _ in waiting.poll(50):
                channel = self._channels[descriptor]
                channel.authenticate()
                if channel.is_open:
                    channel.write()
                if channel.closed or not channel.unsent:
                    waiting.unregister(descriptor)
                    channel.unsent.clear()
                else:
                    waiting.modify(descriptor, _awaited(channel))
        # A socket that is closed with unread bytes takes back what it still has to send.
        sockets = [channel.socket for channel in self._channels.values() if channel.is_open]
        while any(map(unacknowledged, sockets)) and time.monotonic() < end:
            time.sleep(_DRAIN_SECONDS)
        self.abandon()

    def abandon(self) -> None:
        """Close the sockets at once. Also called in a process that was forked: it closes its copies
        and changes nothing that both share."""
        if self._listener is not None:
            self._listener.close()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._poll.close()
        os.close(self._wake_descriptor)

    def _write(self, channel: Channel) -> None:
        """Send what the kernel takes now; ask to be told when it takes more."""
        waited = channel.waits
        self.bytes_sent += channel.write()
        tracked = channel.tracked
        while tracked and tracked[0][0] <= channel.bytes_departed:
            self._departed.append(tracked.popleft()[1])
        if waited != channel.waits:
            events = select.EPOLLIN | (select.EPOLLOUT if channel.waits else 0)
            self._poll.modify(channel.socket, events)

    def _read(self, channel: Channel, place: Place | None) -> None:
        """Take what one connection has, up to a fair number of bytes."""
        before, more = channel.bytes_received, True
        if not channel.is_open:
            self._introduce(channel)
            more = channel.is_open
        while more and not channel.closed:
            more = channel.fill()
            while (packet := self._next(channel, place)) is not None:
                self._arrived.append(packet)
            if channel.bytes_received - before > _TURN_BYTES and not channel.has_record:
                break
        self.bytes_received += channel.bytes_received - before
        if channel.closed:
            self._drop(channel)
        elif channel.is_open:
            channel.be_patient()

    def _next(self, channel: Channel, place: Place | None) -> Packet[T] | None:
        """Return the next packet that has wholly come."""
        if channel.messages is None:
            head = channel.take_head()
            if head is None:
                return None
            try:
                sizes, channel.messages = self._decoder.decode(head)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                channel.closed, channel.why = True, f"a packet cannot be read ({error})"
                return None
            in_place = place(channel.messages) if sizes and place is not None else None
            channel.expect(sizes, in_place)
        if channel.missing or channel.closed:
            return None
        messages, channel.messages = channel.messages, None
        return Packet(channel.peer, messages, channel.payloads, not channel.is_caller)

    def _introduce(self, channel: Channel) -> None:
        """Continue the handshake with a server that we call."""
        channel.authenticate()
        if channel.is_refused:
            raise not_a_member(channel, self.name, self._calls[channel.peer].endpoint)
        if channel.is_open:
            del self._calls[channel.peer]
            self._write(channel)

    def _welcome(self, listener: ChannelListener) -> None:
        """Take over those who are authenticated now."""
        for channel in listener.accept():
            self._workers[channel.peer] = channel
            self._add(channel)

    def _call(self, peer: str, endpoint: str, seconds: float) -> Channel:
        try:
            connection = connected(endpoint, seconds)
        except OSError as error:
            raise self._unreachable(peer, endpoint, error) from error
        handshake = Initiator(self._key, self.name, peer, self._encrypted)
        channel = Channel(connection, handshake, self._largest_head, self._largest_payload)
        self._add(channel)
        return channel

    def _call_again(self) -> None:
        """Call those again whose connection was lost before they were authenticated: too many
        called at once."""
        now = time.monotonic()
        for peer, call in list(self._calls.items()):
            if call.again_at is None or now < call.again_at:
                continue
            call.until, call.again_at = call.until or now + CONNECT_SECONDS, None
            if now >= call.until:
                error = ConnectionError("it closes the connection before it lets us in")
                raise self._unreachable(peer, call.endpoint, error)
            before = self._servers[peer]
            again = self._servers[peer] = self._call(peer, call.endpoint, call.until - now)
            again.unsent, again.tracked = before.unsent, before.tracked
            again.bytes_put = before.bytes_put

    def _unreachable(self, peer: str, endpoint: str, error: OSError) -> ExchangeError:
        reason = error.strerror or str(error)
        return ExchangeError(f"{self.name} cannot reach {peer} at {endpoint} ({reason}).")

    def _add(self, channel: Channel) -> None:
        bound_buffers(channel.socket)
        self._channels[channel.socket.fileno()] = channel
        self._poll.register(channel.socket, select.EPOLLIN)

    def _drop(self, channel: Channel) -> None:
        """Forget a connection that has closed; report it if it was a member's."""
        peer = channel.peer
        self._poll.unregister(channel.socket)
        del self._channels[channel.socket.fileno()]
        channel.close()
        if channel.is_caller and (call := self._calls.get(peer)) is not None:
            call.again_at = time.monotonic() + AGAIN_SECONDS
            return
        channel.unsent.clear()
        known = self._servers if channel.is_caller else self._workers
        if known.get(peer) is channel:
            self._arrived.append(Closed(peer, channel.why))
            if not channel.is_caller:
                del self._workers[peer]


def _awaited(channel: Channel) -> int:
    return select.POLLOUT if channel.is_open else select.POLLIN
