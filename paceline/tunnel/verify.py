"""Measure every link before a run: a short burst in each direction, one link at a time.

The far end is the rack's bridge, so only the host's own cable is in the way (and, for an uplink,
the cables between the racks). What is measured is what leaves the shaped queue while it is kept
full, between two readings of its counter: a receiver would show how busy this machine is instead.
A rate off by more than 5 % is an error, because a run on a wrong network is worse than none.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.spec import Link
from paceline.tunnel.hosts import SWITCH, Tunnel
from paceline.tunnel.links import bucket_bytes
from paceline.tunnel.namespaces import call_in
from paceline.units import format_bandwidth

TOLERANCE_FRACTION = 0.05
_SETTLING_SECONDS = 0.01
_WINDOW_SECONDS = 0.05
_MOST_BYTES = 32 << 20
_TRIES = 16
_PAUSE_SECONDS = 0.05
"""A busy machine serves a queue late, and spoils one try; wrong shaping spoils all."""

_READINGS = 3
_BLOCK_BYTES = 1 << 20
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCheck:
    """One direction as measured, in bits per second of the wire."""

    host: str
    direction: str
    asked_bits_per_second: float
    measured_bits_per_second: float

    @property
    def off_fraction(self) -> float:
        return self.measured_bits_per_second / self.asked_bits_per_second - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Route:
    """A burst between a host and a bridge, and the queue that is to limit it."""

    host: str
    bridge_of: str
    direction: str
    link: Link
    queue: tuple[str, str]


def measure_links(tunnel: Tunnel) -> list[LinkCheck]:
    """Measure all links; raise PacelineError for the first that is off."""
    return [_check(tunnel, route) for route in (*_cables(tunnel), *_uplinks(tunnel))]


def _cables(tunnel: Tunnel) -> Iterator[_Route]:
    for name, plan in tunnel.plans.items():
        queues = {"up": (name, "eth0"), "down": (SWITCH, tunnel.port(name))}
        for direction, queue in queues.items():
            yield _Route(
                host=name, bridge_of=plan.rack, direction=direction, link=plan.link, queue=queue
            )


def _uplinks(tunnel: Tunnel) -> Iterator[_Route]:
    """From a host of each rack to another rack's bridge, where its own cable is the wider one."""
    if tunnel.uplink is None or len(tunnel.racks) < 2:
        return
    for index, rack in enumerate(tunnel.racks):
        other = tunnel.racks[index - 1]
        host = next(plan for plan in tunnel.plans.values() if plan.rack == rack)
        if host.link.bandwidth_bits_per_second <= tunnel.uplink.bandwidth_bits_per_second:
            continue
        for direction, end in (("up", f"up{index}"), ("down", f"core{index}")):
            yield _Route(
                host=host.name,
                bridge_of=other,
                direction=direction,
                link=tunnel.uplink,
                queue=(SWITCH, end),
            )


def _check(tunnel: Tunnel, route: _Route) -> LinkCheck:
    asked, tries = route.link.bandwidth_bits_per_second, []
    for number in range(_TRIES):
        time.sleep(_PAUSE_SECONDS * number)
        tries.append(_burst(tunnel, route))
        if abs(tries[-1] / asked - 1) <= TOLERANCE_FRACTION:
            break
    measured = min(tries, key=lambda rate: abs(rate / asked - 1))
    check = LinkCheck(
        host=route.host,
        direction=route.direction,
        asked_bits_per_second=asked,
        measured_bits_per_second=measured,
    )
    if abs(check.off_fraction) > TOLERANCE_FRACTION:
        raise PacelineError(
            f"link of {route.host}, {route.direction}: asked for {format_bandwidth(asked)}, "
            f"measured {format_bandwidth(measured)} ({check.off_fraction:+.0%})\n"
            f"  fix: free this machine's cores, or slow everything alike with dilation."
        )
    return check


def _burst(tunnel: Tunnel, route: _Route) -> float:
    """Bits per second that leave the route's queue in the fastest window of a short flow.

    On a busy machine a flow stalls now and then; the fastest window is the one that did not.
    """
    rate = route.link.bandwidth_bits_per_second / 8
    # A queue that stalled catches up by a bucket: the window is long enough not to show it.
    window_seconds = max(_WINDOW_SECONDS, 30 * bucket_bytes(route.link) / rate)
    buffer_bytes = int(min(_MOST_BYTES, 2 * window_seconds * rate)) + _BLOCK_BYTES
    near, far = _connect(tunnel, route, buffer_bytes)
    sender, receiver = (near, far) if route.direction == "up" else (far, near)
    points = []
    with _flow(sender, receiver):
        # First the shaper's bucket empties, and TCP needs some round trips to open its window.
        time.sleep(_SETTLING_SECONDS + 30 * route.link.latency_seconds)
        until = time.monotonic() + 2 * window_seconds
        while time.monotonic() < until:
            points.append(_reading(tunnel, route))
            time.sleep(window_seconds / 20)
    return _fastest_window(points, window_seconds)


def _fastest_window(points: list[tuple[float, int]], window_seconds: float) -> float:
    """The most bits per second between two readings a window or more apart."""
    fastest, first = 0.0, 0
    for moment, total in points:
        while first < len(points) and moment - points[first][0] >= window_seconds:
            began, before = points[first]
            fastest = max(fastest, 8 * (total - before) / (moment - began))
            first += 1
    return fastest


def _connect(tunnel: Tunnel, route: _Route, size: int) -> tuple[socket.socket, socket.socket]:
    """A socket in the host and one on the bridge, connected, with buffers of `size` bytes."""
    target = tunnel.rack_address(route.bridge_of)

    def listen() -> socket.socket:
        listener = _roomy(size)
        # The switch has all racks' bridges in one network: this one, and no other.
        bridge = tunnel.bridge(route.bridge_of).encode()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, bridge)
        listener.bind((target, 0))
        listener.listen(1)
        return listener

    def connect(port: int) -> socket.socket:
        near = _roomy(size)
        near.connect((target, port))
        return near

    with call_in(tunnel.namespace(SWITCH), listen) as listener:
        port = listener.getsockname()[1]
        near = call_in(tunnel.namespace(route.host), lambda: connect(port))
        far, _ = listener.accept()
    return near, far


def _roomy(size: int) -> socket.socket:
    opened = socket.socket()
    opened.settimeout(20)
    # Buffers count the kernel's bookkeeping too: three times the data holds the data.
    for force in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        opened.setsockopt(socket.SOL_SOCKET, force, min(3 * size, 0x3FFF_FFFF))
    return opened


def _reading(tunnel: Tunnel, route: _Route) -> tuple[float, int]:
    """When and how much: the reading that took least time, for its moment is known best."""
    namespace, interface = route.queue
    readings = []
    for _ in range(_READINGS):
        began = time.monotonic()
        count = tunnel.sent_by(namespace, interface)
        ended = time.monotonic()
        readings.append((ended - began, (began + ended) / 2, count.bytes))
    _, moment, total = min(readings)
    return moment, total


@contextlib.contextmanager
def _flow(sender: socket.socket, receiver: socket.socket) -> Iterator[None]:
    """Data flows from one socket to the other inside the block; both are closed after it."""

    def send() -> None:
        block = bytes(_BLOCK_BYTES)
        with contextlib.suppress(OSError):
            while True:
                sender.sendall(block)

    def receive() -> None:
        into = bytearray(_BLOCK_BYTES)
        with contextlib.suppress(OSError):
            while receiver.recv_into(into):
                pass

    threads = [threading.Thread(target=task, name="burst") for task in (send, receive)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for one in (sender, receiver):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        sender.close()
        receiver.close()
