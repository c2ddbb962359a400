"""Hosts see each other over cables of the asked rate, and what crosses a cable is counted."""

import socket
import threading

import pytest

from paceline.errors import PacelineError, SpecError
from paceline.spec import parse_link
from paceline.telemetry.network import InterfaceTraffic
from paceline.tunnel import links
from paceline.tunnel.hosts import HostPlan, Tunnel
from paceline.tunnel.namespaces import call_in
from paceline.tunnel.verify import measure_links

pytestmark = [pytest.mark.tunnel, pytest.mark.quiet]

FAST, SLOW = parse_link("400mbit", "test"), parse_link("100mbit", "test")


def send(network: Tunnel, source: str, target: str, size_bytes: int) -> None:
    """One TCP transfer between two hosts."""
    address = network.address(target)
    listener = call_in(network.namespace(target), lambda: socket.create_server((address, 0)))
    port = listener.getsockname()[1]
    with listener:
        sender = call_in(
            network.namespace(source), lambda: socket.create_connection((address, port), timeout=10)
        )
        receiver, _ = listener.accept()
        with sender, receiver:
            thread = threading.Thread(target=sender.sendall, args=(bytes(size_bytes),))
            thread.start()
            left = size_bytes
            while left:
                left -= len(receiver.recv(left))
            thread.join()


def test_links_are_measured_as_asked(rights):
    plans = [HostPlan(name="fast", link=FAST), HostPlan(name="slow", link=SLOW)]
    with Tunnel(plans) as network:
        checks = measure_links(network)
    found = {(check.host, check.direction): check.asked_bits_per_second for check in checks}
    assert found == {
        ("fast", "up"): 4e8,
        ("fast", "down"): 4e8,
        ("slow", "up"): 1e8,
        ("slow", "down"): 1e8,
    }


def test_a_link_that_is_not_what_was_asked_is_an_error(rights):
    with Tunnel([HostPlan(name="a", link=FAST)]) as network:
        links.shape(network.namespace("a"), "eth0", SLOW, "change")
        with pytest.raises(PacelineError, match="link of a, up: asked for 400 Mbit/s"):
            measure_links(network)
        with pytest.raises(PacelineError, match="kernel has 100 Mbit/s"):
            links.read_back(network.namespace("a"), {"eth0": FAST})


def test_a_link_can_change_while_it_runs(rights):
    with Tunnel([HostPlan(name="a", link=FAST)]) as network:
        network.reshape("a", SLOW)
        links.read_back(network.namespace("a"), {"eth0": SLOW})
        with pytest.raises(PacelineError, match="kernel has 100 Mbit/s"):
            links.read_back(network.namespace("a"), {"eth0": FAST})


def test_counters_tell_what_a_cable_carried(rights):
    size = 10_000_000
    with Tunnel([HostPlan(name="a", link=FAST), HostPlan(name="b", link=FAST)]) as network:
        own = call_in(network.namespace("b"), InterfaceTraffic)
        send(network, "a", "b", size)
        traffic = network.traffic()
        inside = call_in(network.namespace("b"), own.read)
    assert traffic["a"].sent.payload_bytes == pytest.approx(size, rel=0.01)
    assert traffic["b"].received.payload_bytes == pytest.approx(size, rel=0.01)
    segments = size / links.SEGMENT_BYTES
    assert traffic["b"].received.packets == pytest.approx(segments, rel=0.05)
    # The member's own view, from inside its host, is the same as the switch's.
    assert inside.bytes_received == pytest.approx(traffic["b"].received.bytes, rel=0.001)
    assert inside.packets_received == traffic["b"].received.packets
    assert inside.packets_sent == traffic["b"].sent.packets


def test_racks_share_an_uplink(rights):
    plans = [HostPlan(name=f"{rack}{i}", link=FAST, rack=rack) for rack in "ab" for i in range(2)]
    with Tunnel(plans, uplink=SLOW) as network:
        checks = measure_links(network)
        send(network, "a0", "b1", 1_000_000)
        send(network, "a0", "a1", 1_000_000)
    assert 1e8 in {check.asked_bits_per_second for check in checks}, "the uplink was measured"


def test_racks_need_an_uplink():
    plans = [HostPlan(name=rack, link=FAST, rack=rack) for rack in "ab"]
    with pytest.raises(SpecError, match="2 racks"):
        Tunnel(plans)


def buffers_between(plans):
    """What the kernel gives a connection from host a to host b: to send from, to receive into."""
    with Tunnel(plans) as network:
        address = network.address("b")
        listener = call_in(network.namespace("b"), lambda: socket.create_server((address, 0)))
        with listener:
            port = listener.getsockname()[1]
            made = call_in(
                network.namespace("a"),
                lambda: socket.create_connection((address, port), timeout=10),
            )
            with made, listener.accept()[0] as other:
                sending = made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
                return sending, other.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def test_on_delayed_links_the_sender_bounds_what_is_on_its_way(rights):
    """Where receivers did, a server's link that was full both ways lost a sixth of one way."""
    delayed = parse_link("400mbit,5ms", "test")
    sending, receiving = buffers_between([HostPlan(name=name, link=delayed) for name in "ab"])
    assert sending == links.window_bytes(delayed)
    assert sending >= 400e6 / 8 * 2 * 5e-3
    assert receiving >= 4 * sending


def test_latency_delays_and_keeps_the_rate(rights):
    link = parse_link("100mbit,5ms", "test")
    with Tunnel([HostPlan(name="a", link=link), HostPlan(name="b", link=link)]) as network:
        measure_links(network)
        address = network.address("b")
        server = call_in(network.namespace("b"), lambda: socket.create_server((address, 0)))
        port = server.getsockname()[1]
        with server:
            client = call_in(
                network.namespace("a"), lambda: socket.create_connection((address, port), 10)
            )
            with client:
                microseconds = smoothed_round_trip(client)
    assert microseconds >= 2 * 5000


def smoothed_round_trip(connection: socket.socket) -> int:
    """What TCP itself found, in microseconds (tcpi_rtt)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[68:72], "little")
