"""Latency of a link: the kernel's netem where it exists, else a relay of our own.

A message from one host to another is late by the latency of the sender's link. Kernels without
netem get the host a tap device instead of a veth; a relay process reads its packets, keeps each for
the latency, and writes it to a second tap on the bridge. Packets stay large (GSO) on the way, some
2,000 a second for 1 Gbit, which is why a relay in Python carries it and the rate stays what the
shaping says. Below about 100 us the relay's own time shows; it is part of the delay, never on top.

    python -m paceline.tunnel.delay HOST_FD PORT_FD SECONDS      the relay, on descriptors it
    inherits
"""

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from paceline.errors import MissingError, PacelineError
from paceline.spec import Link
from paceline.tunnel.namespaces import call_in, die_with_parent, ip, tc

_TUN = Path("/dev/net/tun")
_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0
_TAP_WITHOUT_INFO_WITH_OFFLOAD_HEADER = 0x0002 | 0x1000 | 0x4000
_CHECKSUM_AND_SEGMENTATION = 0x01 | 0x02
_LARGEST_FRAME_BYTES = 10 + 14 + 65536
_QUEUE_PACKETS = 10_000


def netem_available(namespace: str) -> bool:
    """Whether this kernel has netem; tried out on the namespace's loopback."""
    try:
        tc("qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms", namespace=namespace)
    except PacelineError:
        return False
    tc("qdisc", "delete", "dev", "lo", "root", namespace=namespace)
    return True


def netem_command(interface: str, link: Link) -> str:
    """The line of a tc batch that delays what waits in the shaper of `interface`."""
    microseconds = link.latency_seconds * 1e6
    return (
        f"qdisc add dev {interface} parent 1:1 handle 10: "
        f"netem delay {microseconds:.0f}us limit {_QUEUE_PACKETS}"
    )


class Relay:
    """A cable between a host and a port of the switch that delays what the host sends."""

    def __init__(self, namespace: str, interface: str, switch: str, port: str, link: Link) -> None:
        if not _TUN.exists():
            given = f"link latency {link.latency_seconds:g} s"
            problem = f"{given} needs netem or {_TUN}, and both are missing."
            raise MissingError(problem, "modprobe sch_netem or tun, or leave the latency out.")
        near = call_in(namespace, lambda: _open_tap(interface))
        far = call_in(switch, lambda: _open_tap(port))
        for inside, name in ((namespace, interface), (switch, port)):
            ip("link", "set", name, "txqueuelen", str(_QUEUE_PACKETS), namespace=inside)
        argv = [sys.executable, "-m", "paceline.tunnel.delay"]
        argv += [str(near), str(far), str(link.latency_seconds)]
        self._process = subprocess.Popen(argv, pass_fds=(near, far), stdin=subprocess.DEVNULL)
        os.close(near)
        os.close(far)

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def _open_tap(name: str) -> int:
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_INFO_WITH_OFFLOAD_HEADER)
    fcntl.ioctl(descriptor, _SET_INTERFACE, request)
    fcntl.ioctl(descriptor, _SET_OFFLOAD, _CHECKSUM_AND_SEGMENTATION)
    return descriptor


def _relay(host: int, port: int, latency_seconds: float) -> None:
    """Carry packets until killed: from the host late, to the host at once."""
    held: deque[tuple[float, bytes]] = deque()
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable, _, _ = select.select([host, port], [], [], wait)
        if host in readable:
            due = time.monotonic() + latency_seconds
            held.extend((due, packet) for packet in _waiting(host))
        if port in readable:
            for packet in _waiting(port):
                _write(host, packet)
        now = time.monotonic()
        while held and held[0][0] <= now:
            _write(port, held.popleft()[1])


def _waiting(descriptor: int) -> list[bytes]:
    """What has arrived, at most a few packets, so that neither direction starves the other."""
    packets = []
    for _ in range(8):
        try:
            packets.append(os.read(descriptor, _LARGEST_FRAME_BYTES))
        except BlockingIOError:
            break
    return packets


def _write(descriptor: int, packet: bytes) -> None:
    try:
        os.write(descriptor, packet)
    except OSError:
        # The interface is still coming up: the packet is lost, as on a cable just plugged in.
        return


if __name__ == "__main__":
    die_with_parent()
    _relay(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
