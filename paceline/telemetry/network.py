"""Bytes and packets of one member, from the kernel's own counters.

A member in a host of its own (a network namespace) owns every packet of its interfaces. On a shared
host the interface counts everybody's, so there the member asks the kernel about each of its own TCP
sockets (TCP_INFO): exact, without rights, whatever library opened the socket.
"""

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from paceline.telemetry.queues import HEADER_BYTES, QueueCounters

_TCP_INFO_COUNTERS = struct.Struct("=QQII")
_TCP_INFO_OFFSET = 120  # tcpi_bytes_acked, tcpi_bytes_received, tcpi_segs_out, tcpi_segs_in


class Traffic(NamedTuple):
    """Totals since the member started."""

    bytes_sent: int
    bytes_received: int
    packets_sent: int
    packets_received: int


class SocketTraffic:
    """Totals over this process's TCP sockets, closed ones included as they were last seen."""

    def __init__(self) -> None:
        self._by_socket: dict[str, Traffic] = {}

    def read(self) -> Traffic:
        for entry in os.scandir("/proc/self/fd"):
            try:
                name = os.readlink(entry.path)
                if name.startswith("socket:"):
                    self._look(name, int(entry.name))
            except OSError:
                continue  # closed between the listing and the look, or not TCP
        totals = zip(*self._by_socket.values(), strict=True) if self._by_socket else [(0,)] * 4
        return Traffic(*(sum(column) for column in totals))

    def _look(self, name: str, descriptor: int) -> None:
        duplicate = os.dup(descriptor)
        with socket.socket(fileno=duplicate) as one:
            if one.type != socket.SOCK_STREAM or one.family == socket.AF_UNIX:
                return
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) >= _TCP_INFO_OFFSET + _TCP_INFO_COUNTERS.size:
            self._by_socket[name] = Traffic(*_TCP_INFO_COUNTERS.unpack_from(info, _TCP_INFO_OFFSET))


class InterfaceTraffic:
    """Totals of every interface of this network namespace but loopback, since the first look.

    Where queues count segments (the tunnel), a large packet is as many as it would be on a cable.
    """

    def __init__(self) -> None:
        self._queues = QueueCounters()
        self._at_start = self._totals()

    def read(self) -> Traffic:
        pairs = zip(self._totals(), self._at_start, strict=True)
        return Traffic(*(now - then for now, then in pairs))

    def _totals(self) -> Traffic:
        out, into = self._queues.read()
        sent = received = packets_sent = packets_received = 0
        for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
            name, _, counters = line.partition(":")
            name, columns = name.strip(), [int(column) for column in counters.split()]
            if name == "lo":
                continue
            bytes_in, packets_in, bytes_out, packets_out = *columns[:2], *columns[8:10]
            if name in out and name in into:
                bytes_out, packets_out = out[name].bytes, out[name].packets
                bytes_in += HEADER_BYTES * (into[name].packets - packets_in)
                packets_in = into[name].packets
            received, packets_received = received + bytes_in, packets_received + packets_in
            sent, packets_sent = sent + bytes_out, packets_sent + packets_out
        return Traffic(sent, received, packets_sent, packets_received)
