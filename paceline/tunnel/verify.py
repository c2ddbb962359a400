"""Measure every link before a run: a short burst in each direction, one link at a time.

The far end is the rack's bridge, so only the host's own cable is in the way (and, for an uplink,
the cables between the racks). A rate off by more than 5 % is an error: a run on a wrong network is
worse than none. A burst that comes out wrong is tried again first: a busy machine spoils one, wrong
shaping spoils all.
"""

import socket
import threading
import time
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.spec import Link
from paceline.tunnel.hosts import SWITCH, Tunnel
from paceline.tunnel.links import PAYLOAD_FRACTION
from paceline.tunnel.namespaces import call_in
from paceline.units import format_bandwidth

TOLERANCE_FRACTION = 0.05
_BURST_SECONDS = 0.06
_TRIES = 5
_BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCheck:
    """One direction as measured: payload over time, scaled to the rate of the wire."""

    host: str
    direction: str
    asked_bits_per_second: float
    measured_bits_per_second: float

    @property
    def off_fraction(self) -> float:
        return self.measured_bits_per_second / self.asked_bits_per_second - 1


def measure_links(tunnel: Tunnel) -> list[LinkCheck]:
    """Measure all links; raise PacelineError for the first that is off."""
    checks = [
        _settled(tunnel, name, plan.rack, direction, plan.link)
        for name, plan in tunnel.plans.items()
        for direction in ("up", "down")
    ]
    if tunnel.uplink is not None:
        first, second = tunnel.racks[0], tunnel.racks[1]
        checks += _uplink_checks(tunnel, first, second, tunnel.uplink)
    return checks


def _uplink_checks(tunnel: Tunnel, first: str, second: str, uplink: Link) -> list[LinkCheck]:
    """From a host of one rack to the other rack's bridge: its own cable or the uplink is the
    narrower."""
    checks = []
    for rack, far in ((first, second), (second, first)):
        host = next(plan for plan in tunnel.plans.values() if plan.rack == rack)
        if host.link.bandwidth_bits_per_second > uplink.bandwidth_bits_per_second:
            checks += [_settled(tunnel, host.name, far, way, uplink) for way in ("up", "down")]
    return checks


def _settled(tunnel: Tunnel, host: str, rack: str, direction: str, link: Link) -> LinkCheck:
    asked, tries = link.bandwidth_bits_per_second, []
    for _ in range(_TRIES):
        tries.append(_burst(tunnel, host, rack, direction, link) / PAYLOAD_FRACTION)
        if abs(tries[-1] / asked - 1) <= TOLERANCE_FRACTION:
            break
    measured = min(tries, key=lambda rate: abs(rate / asked - 1))
    check = LinkCheck(
        host=host,
        direction=direction,
        asked_bits_per_second=asked,
        measured_bits_per_second=measured,
    )
    if abs(check.off_fraction) > TOLERANCE_FRACTION:
        raise PacelineError(
            f"link of {host}, {direction}: asked for {format_bandwidth(asked)}, measured "
            f"{format_bandwidth(measured)} ({check.off_fraction:+.0%})\n"
            f"  fix: free this machine's cores, or slow everything alike with dilation."
        )
    return check


def _burst(tunnel: Tunnel, host: str, rack: str, direction: str, link: Link) -> float:
    """Payload bits per second of one connection over the link, the first two thirds left out."""
    inside, switch = tunnel.namespace(host), tunnel.namespace(SWITCH)
    listener = call_in(switch, lambda: socket.create_server((tunnel.rack_address(rack), 0)))
    target = listener.getsockname()
    with listener:
        near = call_in(inside, lambda: socket.create_connection(target, timeout=10))
        with near:
            far, _ = listener.accept()
            with far:
                sender, receiver = (near, far) if direction == "up" else (far, near)
                # TCP needs some round trips to open its window; they fall into the part left out.
                seconds = _BURST_SECONDS + 60 * link.latency_seconds
                size = int(link.bandwidth_bits_per_second / 8 * seconds) + _BLOCK_BYTES
                return _timed_transfer(sender, receiver, size)


def _timed_transfer(sender: socket.socket, receiver: socket.socket, size_bytes: int) -> float:
    def send() -> None:
        block, left = memoryview(bytes(_BLOCK_BYTES)), size_bytes
        while left > 0:
            sender.sendall(block[: min(left, _BLOCK_BYTES)])
            left -= _BLOCK_BYTES

    receiver.settimeout(20)
    thread = threading.Thread(target=send, name="burst", daemon=True)
    thread.start()
    into, received, began, skipped = bytearray(_BLOCK_BYTES), 0, 0.0, 0
    while received < size_bytes:
        received += receiver.recv_into(into)
        if not skipped and received >= size_bytes * 2 / 3:
            began, skipped = time.monotonic(), received
    ended = time.monotonic()
    thread.join()
    return 8 * (received - skipped) / (ended - began)
