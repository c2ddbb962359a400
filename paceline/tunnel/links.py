"""Links: one direction of a cable, shaped by the kernel and read back. Hosts are built in hosts.py.

A `tbf` (token bucket) on the sending interface holds a direction to its rate. Packets stay large
(GSO): the bucket counts them as the segments and headers they stand for, so the rate is that of the
wire, at a small part of the CPU that single packets would cost.
"""

from paceline.errors import PacelineError
from paceline.predict.links import WINDOW_BYTES
from paceline.spec import Link
from paceline.tunnel.namespaces import qdiscs, tc
from paceline.units import format_bandwidth

MTU_BYTES = 1500
SEGMENT_BYTES = MTU_BYTES - 20 - 32

_BURST_SECONDS = 2e-3
"""What a link may catch up on when this machine served its queue late; the price is that a message
of so much passes an idle link at once."""

_LARGEST_PACKET_BYTES, _LONGEST_PACKET_SECONDS = 70_000, 10e-3
_LEAST_BURST_BYTES = 16 * 1024
_QUEUE_BYTES = 32 << 20
"""Longer than all windows into one host together: the emulated switch delays and does not drop,
because a lost 64 KiB packet would cost far more here than its 45 segments do on a real switch."""


def shape(namespace: str, interface: str, link: Link, verb: str = "add") -> None:
    """Hold what leaves `interface` to the rate of `link`; `verb` is "change" for a link already
    shaped."""
    tc(batch=[shape_command(interface, link, verb)], namespace=namespace)


def shape_command(interface: str, link: Link, verb: str = "add") -> str:
    """The line of a tc batch that shapes `interface`."""
    rate = link.bandwidth_bits_per_second
    return (
        f"qdisc {verb} dev {interface} root handle 1: "
        f"tbf rate {rate:.0f}bit burst {bucket_bytes(link)} limit {_QUEUE_BYTES}"
    )


def bucket_bytes(link: Link) -> int:
    """What an idle link lets through at once.

    A packet larger than the bucket is cut into segments, which costs many times the CPU.
    """
    rate = link.bandwidth_bits_per_second / 8
    whole_packet_bytes = min(_LARGEST_PACKET_BYTES, rate * _LONGEST_PACKET_SECONDS)
    return int(max(_LEAST_BURST_BYTES, rate * _BURST_SECONDS, whole_packet_bytes))


def count_commands(interface: str) -> list[str]:
    """Lines of a tc batch that count the segments arriving at `interface`; nothing is held back."""
    return [
        f"qdisc add dev {interface} clsact",
        f"filter add dev {interface} ingress protocol all u32 match u32 0 0",
    ]


def read_back(namespace: str, expected: dict[str, Link]) -> None:
    """Raise unless the kernel reports the rate of every interface in `expected`."""
    rates: dict[str, float] = {}
    for qdisc in qdiscs(namespace):
        options = qdisc.get("options")
        if qdisc.get("kind") == "tbf" and isinstance(options, dict):
            rates[str(qdisc["dev"])] = 8.0 * float(options["rate"])
    for interface, link in expected.items():
        asked, found = link.bandwidth_bits_per_second, rates.get(interface)
        if found is None or abs(found / asked - 1) > 0.01:
            said = "no shaping" if found is None else format_bandwidth(found)
            asked_text = format_bandwidth(asked)
            raise PacelineError(
                f"{namespace} {interface}: asked for {asked_text}, kernel has {said}"
            )


def window_bytes(link: Link) -> int:
    """What a connection may have on its way so that `link` stays full: what its latency there and
    back holds, and on a link without any a queue that bridges the moments in which this machine
    does something else."""
    in_flight = link.bandwidth_bits_per_second / 8 * 2 * link.latency_seconds
    return WINDOW_BYTES + int(in_flight)


def buffer_settings(window_bytes: int, *, delayed: bool) -> dict[str, str]:
    """TCP's buffers in a host (names below net/ipv4): who bounds what a connection has on its way.

    Packets on a delayed link pass a relay, and how much of them a receiver's buffer holds differs
    from connection to connection, by half and more. Where a link is full both ways, news of what
    has come waits behind data, so that the direction with the smaller windows falls behind by as
    much. So there the sender bounds, whose buffers hold the same everywhere; receivers have room
    to spare, and do not tune themselves.
    """
    if delayed:
        return {
            "tcp_rmem": f"4096 {4 * window_bytes} {4 * window_bytes}",
            "tcp_wmem": f"4096 {window_bytes} {window_bytes}",
            "tcp_moderate_rcvbuf": "0",
        }
    # The kernel's bookkeeping is counted too, half of a buffer: twice the window gives the window.
    bounds = f"4096 {window_bytes} {2 * window_bytes}"
    return {"tcp_rmem": bounds, "tcp_wmem": bounds}
