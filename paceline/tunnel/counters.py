"""What has crossed each link: bytes, packets and drops, asked of the kernel over rtnetlink.

The counters are those of the shaped queues, not of /proc/net/dev: there one large (GSO) packet counts as
one and without the headers of its segments; the queue counts what a real cable would have carried. Asking
costs some 50 us for a namespace, so a sample every second is free; starting `tc` would not be.
"""

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.tunnel.links import HEADER_BYTES
from paceline.tunnel.namespaces import call_in

_GET_QDISC, _NEW_QDISC, _DONE = 38, 36, 3
_REQUEST_DUMP = 0x301
_ROOT = 0xFFFFFFFF
_STATS2, _BASIC, _QUEUE = 7, 1, 3
_HEADER = struct.Struct("=IHHII")
_MESSAGE = struct.Struct("=BxxxiIII")
_ATTRIBUTE = struct.Struct("=HH")


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one direction of a link has carried since it was made."""

    bytes: int
    packets: int
    drops: int

    @property
    def payload_bytes(self) -> int:
        """What TCP delivered: the bytes without the headers of each packet."""
        return self.bytes - HEADER_BYTES * self.packets


class Counters:
    """Reads the root queues of one namespace."""

    def __init__(self, namespace: str) -> None:
        self._socket = call_in(namespace, _open)
        names = call_in(namespace, socket.if_nameindex)
        self._names = dict(names)

    def read(self) -> dict[str, Traffic]:
        """Traffic sent so far by every shaped interface."""
        request = _MESSAGE.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        size = _HEADER.size + len(request)
        self._socket.send(_HEADER.pack(size, _GET_QDISC, _REQUEST_DUMP, 1, 0) + request)
        traffic: dict[str, Traffic] = {}
        for body in self._dump():
            _, index, _, parent, _ = _MESSAGE.unpack_from(body)
            attributes = dict(_attributes(body[_MESSAGE.size :]))
            if parent == _ROOT and _STATS2 in attributes and index in self._names:
                traffic[self._names[index]] = _traffic(attributes[_STATS2])
        return traffic

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


def _open() -> socket.socket:
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    opened.settimeout(5)
    opened.bind((0, 0))
    return opened


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, offset)
        yield kind & 0x3FFF, data[offset + _ATTRIBUTE.size : offset + size]
        offset += -(-size // 4) * 4


def _traffic(stats: bytes) -> Traffic:
    parts = dict(_attributes(stats))
    sent_bytes, packets = struct.unpack_from("=QI", parts[_BASIC])
    drops = struct.unpack_from("=III", parts[_QUEUE])[2]
    return Traffic(bytes=sent_bytes, packets=packets, drops=drops)
