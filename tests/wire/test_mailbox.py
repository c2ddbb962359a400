"""Packets arrive whole and uncopied; strangers are refused; nothing is left behind."""

import os
import socket
import threading
import time

import pytest
import zmq

from paceline.errors import ExchangeError
from paceline.protocol.messages import Answer, Push
from paceline.wire import JobKey, StreamMailbox, ZeroMqMailbox

KINDS = Push | Answer
SECONDS = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Who closes sends the rest, however long both ends of it wait for a core here."""
    for module in ("stream", "zeromq"):
        monkeypatch.setattr(f"paceline.wire.{module}.LINGER_SECONDS", SECONDS)


def receive(mailbox, count=1, seconds=SECONDS):
    packets, end = [], time.monotonic() + seconds
    while len(packets) < count and time.monotonic() < end:
        packets += mailbox.receive(0.05)
    return packets


def let_in(worker, *servers, seconds=SECONDS):
    """Both ends have a thread that receives; here they take turns."""
    end = time.monotonic() + seconds
    while waits_outside(worker) and time.monotonic() < end:
        for mailbox in (worker, *servers):
            mailbox.receive(0.01)


def waits_outside(worker):
    if isinstance(worker, StreamMailbox):
        return bool(worker._calls)
    return not all(line.is_open for line in worker._servers.values())


WAYS = ["unix", "tcp", "curve"]


def connected(way):
    """A server and a worker that know the same key."""
    kind, key = ZeroMqMailbox if way == "curve" else StreamMailbox, JobKey("secret")
    server, worker = kind("server0", KINDS, key), kind("worker0", KINDS, key)
    endpoint = server.bind("" if way == "unix" else "127.0.0.1")
    worker.connect("server0", endpoint)
    let_in(worker, server)
    return server, worker, endpoint


@pytest.fixture(params=WAYS)
def pair(request):
    server, worker, endpoint = connected(request.param)
    yield server, worker, endpoint
    worker.close()
    server.close()


def test_messages_and_payloads_go_both_ways(pair):
    server, worker, _ = pair
    push = Push(worker=0, chunk=3, step=1, version=1)
    worker.send("server0", [push], [memoryview(b"gradient" * 10000)])
    (packet,) = receive(server)
    assert packet.peer == "worker0"
    assert packet.for_server
    assert packet.messages == [push]
    assert bytes(packet.payloads[0]) == b"gradient" * 10000
    server.reply("worker0", [Answer(3, 2), Answer(4, 2)], [b"weights"])
    (packet,) = receive(worker)
    assert not packet.for_server
    assert [answer.chunk for answer in packet.messages] == [3, 4]
    assert bytes(packet.payloads[0]) == b"weights"


def test_a_stranger_is_refused(pair):
    server, _, endpoint = pair
    stranger = type(server)("worker1", KINDS, JobKey("guess"))
    stranger.connect("server0", endpoint)
    stranger.send("server0", [Push(worker=1, chunk=0, step=0, version=0)])
    if isinstance(server, StreamMailbox):  # CurveZMQ does not even let it speak
        with pytest.raises(ExchangeError, match=r"worker1 and server0 .* do not know the same key"):
            let_in(stranger, server)
        assert server.refused > 0
    assert not receive(server, seconds=0.3)
    close_without_waiting(stranger)


def close_without_waiting(mailbox):
    if isinstance(mailbox, ZeroMqMailbox):
        line = mailbox._servers.pop("server0")
        line.socket.disable_monitor()
        line.monitor.close(linger=0)
        line.socket.close(linger=0)
    mailbox.close()


def test_one_whom_curve_does_not_let_in_is_told_to_look_at_its_key(monkeypatch):
    monkeypatch.setattr("paceline.wire.zeromq.CONNECT_SECONDS", 0.2)
    server, stranger = (ZeroMqMailbox(n, KINDS, JobKey(n)) for n in ("server0", "worker1"))
    stranger.connect("server0", server.bind("127.0.0.1"))
    with pytest.raises(ExchangeError, match=r"does not let worker1 in.*PACELINE_KEY"):
        let_in(stranger, server)
    close_without_waiting(stranger)
    server.close()


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"\x10\0\0\0 not a hello at all", b"\xff" * 5000]
)
def test_one_who_does_not_say_hello_is_refused(words):
    server = StreamMailbox("server0", KINDS, JobKey("k"))
    host, port = server.bind("127.0.0.1").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as line:
        line.sendall(words)
        packets, end = [], time.monotonic() + SECONDS
        while not server.refused and time.monotonic() < end:
            packets += server.receive(0.05)
        assert (packets, server.refused) == ([], 1)
    server.close()


def nonsense(worker):
    words = b"\x80\x04cos\nsystem\n."
    if isinstance(worker, ZeroMqMailbox):
        worker._servers["server0"].socket.send(words)
    else:
        worker._write(worker._servers["server0"], words, ())


def test_nonsense_from_a_member_is_an_error_and_is_not_unpickled(pair):
    server, worker, _ = pair
    nonsense(worker)
    with pytest.raises(ExchangeError, match="cannot read from worker0"):
        receive(server)


def test_packets_of_all_sizes_keep_their_order_and_their_bytes(pair):
    """Heads longer than the buffer they are read into, payloads larger than what a socket takes."""
    server, worker, _ = pair
    sizes = [0, 1, 4095, 4096, 4097, 70_000, 3_000_000, 5, 12_000_000]
    for number, size in enumerate(sizes):
        many = 2000 if number == 4 else 1
        pushes = [Push(worker=0, chunk=number, step=i, version=0) for i in range(many)]
        worker.send("server0", pushes, [bytes([number]) * size, b"and one more"])
    packets, end = [], time.monotonic() + SECONDS
    while len(packets) < len(sizes) and time.monotonic() < end:
        worker.receive(0.0)  # its thread would go on sending
        packets += server.receive(0.01)
    for number, (size, packet) in enumerate(zip(sizes, packets, strict=True)):
        assert [push.chunk for push in packet.messages] == [number] * len(packet.messages)
        assert len(packet.messages) == (2000 if number == 4 else 1)
        assert bytes(packet.payloads[0]) == bytes([number]) * size
        assert bytes(packet.payloads[1]) == b"and one more"


def test_a_payload_is_received_where_it_belongs():
    server, worker = (StreamMailbox(name, KINDS, JobKey("k")) for name in ("server0", "worker0"))
    worker.connect("server0", server.bind("127.0.0.1"))
    let_in(worker, server)
    weights = bytearray(500_000)
    worker.place = lambda messages: memoryview(weights) if messages[0].chunk == 3 else None
    server.reply("worker0", [Answer(3, 2)], [b"w" * 500_000])
    server.reply("worker0", [Answer(3, 2)], [b"of another size"])
    server.reply("worker0", [Answer(4, 2)], [b"v" * 500_000])
    packets, end = [], time.monotonic() + SECONDS
    while len(packets) < 3 and time.monotonic() < end:
        server.receive(0.0)
        packets += worker.receive(0.01)
    assert packets[0].payloads == [None]
    assert bytes(packets[1].payloads[0]) == b"of another size"
    assert bytes(packets[2].payloads[0]) == b"v" * 500_000
    assert weights == b"w" * 500_000
    worker.close()
    server.close()


def test_a_tracked_packet_departs_when_the_network_takes_it(pair):
    """Nobody reads, so the network takes some and not all; then it takes the rest, in order."""
    server, worker, _ = pair
    pushes = [Push(worker=0, chunk=number, step=0, version=0) for number in range(60)]
    for push in pushes:
        worker.send("server0", [push], [b"g" * 2_000_000], tracked=push.chunk % 2 == 0)
    worker.receive(0.0)
    assert len(worker.departed) < 30
    packets, end = [], time.monotonic() + SECONDS
    while len(packets) < len(pushes) and time.monotonic() < end:
        worker.receive(0.0)
        packets += server.receive(0.01)
    assert [packet.messages for packet in packets] == [[push] for push in pushes]
    assert list(worker.departed) == [[push] for push in pushes[::2]]


def test_a_copied_reply_does_not_follow_its_memory(pair):
    server, worker, _ = pair
    worker.send("server0", [Push(worker=0, chunk=0, step=0, version=0)])
    receive(server)
    weights = bytearray(b"1" * 20_000_000)
    server.reply("worker0", [Answer(0, 1)], [memoryview(weights)], copy=True)
    weights[:] = b"2" * 20_000_000
    packets, end = [], time.monotonic() + SECONDS
    while not packets and time.monotonic() < end:
        server.receive(0.0)
        packets += worker.receive(0.01)
    assert bytes(packets[0].payloads[0]) == b"1" * 20_000_000


@pytest.mark.parametrize(
    ("kind", "address"),
    [(StreamMailbox, ""), (StreamMailbox, "127.0.0.1"), (ZeroMqMailbox, "127.0.0.1")],
)
def test_close_sends_what_is_still_to_be_sent(kind, address):
    server, worker = (kind(name, KINDS, JobKey("k")) for name in ("server0", "worker0"))
    worker.connect("server0", server.bind(address))
    pushes = [Push(worker=0, chunk=number, step=0, version=0) for number in range(7)]
    for push in pushes:
        worker.send("server0", [push], [b"g" * 3_000_000])
    assert worker._servers["server0"].unsent
    closing = threading.Thread(target=worker.close)
    closing.start()
    packets = receive(server, count=len(pushes))
    closing.join()
    assert [packet.messages for packet in packets] == [[push] for push in pushes]
    assert all(bytes(packet.payloads[0]) == b"g" * 3_000_000 for packet in packets)
    server.close()


def test_a_socket_of_one_host_leaves_no_file():
    server = StreamMailbox("server0", KINDS, JobKey("k"))
    name = server.bind()
    assert name.startswith("@"), "in the abstract name space"
    assert not os.path.exists(name)
    server.close()


def test_wake_ends_a_wait():
    mailbox = StreamMailbox("worker0", KINDS, JobKey("k"))
    mailbox.wake()
    began = time.monotonic()
    assert mailbox.receive(30.0) == []
    assert time.monotonic() - began < 30
    mailbox.close()


def test_a_reply_to_a_worker_that_has_left_is_dropped(pair):
    server, worker, endpoint = pair
    let_in(worker, server)
    server.reply("worker9", [Answer(0, 0)])
    leaver = type(worker)("worker1", KINDS, JobKey("secret"))
    leaver.connect("server0", endpoint)
    let_in(leaver, server)
    leaver.send("server0", [Push(worker=1, chunk=0, step=0, version=0)])
    receive(server)
    leaver.close()
    receive(server, seconds=0.1)
    for _ in range(3):
        server.reply("worker1", [Answer(0, 0)], [b"weights"])
    server.reply("worker0", [Answer(0, 1)])
    assert [packet.messages for packet in receive(worker)] == [[Answer(0, 1)]]


def receive_until_lost(mailbox, seconds=SECONDS):
    packets, end = [], time.monotonic() + seconds
    while not mailbox.lost and time.monotonic() < end:
        packets += mailbox.receive(0.05)
    return packets


def test_a_worker_that_is_gone_is_lost_behind_all_that_it_had_sent(pair):
    server, worker, endpoint = pair
    leaver = type(worker)("worker1", KINDS, JobKey("secret"))
    leaver.connect("server0", endpoint)
    let_in(leaver, server)
    pushes = [Push(worker=1, chunk=number, step=0, version=0) for number in range(200)]
    for push in pushes:
        leaver.send("server0", [push], [b"gradient" * 100])
    closing = threading.Thread(target=leaver.close)
    closing.start()
    packets = receive_until_lost(server)
    closing.join()
    assert [packet.messages for packet in packets] == [[push] for push in pushes]
    assert list(server.lost) == ["worker1"]
    worker.send("server0", [pushes[0]])
    assert receive(server)[0].peer == "worker0", "it has not gone"


def test_bytes_that_a_leaving_worker_has_not_read_take_nothing_back_that_it_sent():
    """The kernel drops what it has still to send when a socket is closed with unread bytes."""
    server, worker, _ = connected("tcp")
    pushes = [Push(worker=0, chunk=number, step=0, version=0) for number in range(400)]
    for push in pushes:
        worker.send("server0", [push], [bytes(100_000)])
    server.receive(0.1)
    server.reply("worker0", [Answer(0, 1)], [b"weights" * 1000])
    closing = threading.Thread(target=worker.close)
    closing.start()
    packets = receive_until_lost(server)
    closing.join()
    server.close()
    assert len(packets) >= len(pushes) - 20, "the first were received before"
    assert packets[-1].messages == [pushes[-1]]


@pytest.mark.parametrize("way", WAYS)
def test_the_last_words_of_a_server_are_heard_before_it_is_lost(way):
    """Also by a worker that has so much to send that it notices first that nobody takes it."""
    server, worker, _ = connected(way)
    worker.send("server0", [Push(worker=0, chunk=0, step=0, version=0)])
    receive(server)
    server.reply("worker0", [Answer(0, 1)], [b"weights"])
    server.receive(0.0)
    server.close()
    for number in range(20):
        worker.send("server0", [Push(worker=0, chunk=number, step=0, version=0)], [b"g" * 100_000])
    (packet,) = receive_until_lost(worker)
    assert packet.messages == [Answer(0, 1)]
    assert list(worker.lost) == ["server0"]
    worker.send("server0", [Push(worker=0, chunk=0, step=1, version=0)])
    assert receive(worker, seconds=0.1) == []
    close_without_waiting(worker)


def test_a_server_that_is_not_there_is_named():
    worker = StreamMailbox("worker0", KINDS, JobKey("k"))
    with pytest.raises(ExchangeError, match="worker0 cannot reach server0 at @nobody"):
        worker.connect("server0", "@nobody")
    worker.close()


def test_proofs_differ_by_purpose_name_and_key():
    key = JobKey("k")
    proof = key.derive(b"caller", b"worker0", b"server0")
    assert key.matches(proof, b"caller", b"worker0", b"server0")
    assert not key.matches(proof, b"callee", b"worker0", b"server0")
    assert not key.matches(proof, b"caller", b"worker1", b"server0")
    assert not key.matches(proof, b"caller", b"worker", b"0server0")
    assert not JobKey("l").matches(proof, b"caller", b"worker0", b"server0")
    assert zmq.has("curve")
