"""Bytes and packets that crossed an interface, counted as a cable would, from the kernel's queues
over rtnetlink.

/proc/net/dev counts one large (GSO) packet as one, without the headers of the segments it stands
for; a queue counts segments. A namespace of the tunnel has a queue on both sides of its interface:
the shaper on the way out, a filter that only counts on the way in. Asking costs some 50 us;
starting `tc` would not.
"""

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IP and TCP (with timestamps) in front of every segment's payload."""

_GET_QDISC, _NEW_QDISC, _DONE = 38, 36, 3
_REQUEST_DUMP = 0x301
_OUT, _IN = 0xFFFFFFFF, 0xFFFFFFF1
_STATS2, _BASIC, _QUEUE = 7, 1, 3
_HEADER = struct.Struct("=IHHII")
_MESSAGE = struct.Struct("=BxxxiIII")
_ATTRIBUTE = struct.Struct("=HH")


class QueueCount(NamedTuple):
    """Bytes and packets that one queue has passed on since it was made."""

    bytes: int
    packets: int
    drops: int

    @property
    def payload_bytes(self) -> int:
        """Bytes that TCP delivered, without the headers of each packet."""
        return self.bytes - HEADER_BYTES * self.packets


class QueueCounters:
    """The queues of the network namespace in which it was made, from whatever thread it is read."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(5)
        self._socket.bind((0, 0))
        self._names = dict(socket.if_nameindex())

    def read(self) -> tuple[dict[str, QueueCount], dict[str, QueueCount]]:
        """Counts on the way out and on the way in, by interface; only interfaces with such a queue.

        Bytes on the way in lack the Ethernet header, and the segments' headers after the first.
        """
        request = _MESSAGE.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        size = _HEADER.size + len(request)
        self._socket.send(_HEADER.pack(size, _GET_QDISC, _REQUEST_DUMP, 1, 0) + request)
        out: dict[str, QueueCount] = {}
        into: dict[str, QueueCount] = {}
        for body in self._dump():
            _, index, _, parent, _ = _MESSAGE.unpack_from(body)
            attributes = dict(_attributes(body[_MESSAGE.size :]))
            if parent in (_OUT, _IN) and _STATS2 in attributes and index in self._names:
                side = out if parent == _OUT else into
                side[self._names[index]] = _count(attributes[_STATS2])
        return out, into

    def close(self) -> None:
        self._socket.close()

    def _dump(self) -> Iterator[bytes]:
        while True:
            data = self._socket.recv(1 << 20)
            offset = 0
            while offset < len(data):
                size, kind, _, _, _ = _HEADER.unpack_from(data, offset)
                if kind == _DONE:
                    return
                if kind == _NEW_QDISC:
                    yield data[offset + _HEADER.size : offset + size]
                offset += -(-size // 4) * 4


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, offset)
        yield kind & 0x3FFF, data[offset + _ATTRIBUTE.size : offset + size]
        offset += -(-size // 4) * 4


def _count(stats: bytes) -> QueueCount:
    parts = dict(_attributes(stats))
    sent_bytes, packets = struct.unpack_from("=QI", parts[_BASIC])
    drops = struct.unpack_from("=III", parts[_QUEUE])[2]
    return QueueCount(sent_bytes, packets, drops)
