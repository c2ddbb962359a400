"""Packets arrive whole and in place; other keys are refused; nothing is left behind."""

import os
import socket
import threading
import time

import pytest

from paceline.errors import ExchangeError
from paceline.protocol.messages import Answer, Push
from paceline.wire import Closed, JobKey, Mailbox, Packet
from paceline.wire.encryption import RECORD_BYTES

KINDS = Push | Answer
SECONDS = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A mailbox that closes sends the rest, however long both ends of it wait for a core here."""
    monkeypatch.setattr("paceline.wire.mailbox.LINGER_SECONDS", SECONDS)


def push(chunk=0, worker=0):
    return Push(worker=worker, chunk=chunk, step=0, version=0)


def send(worker, messages, payloads=(), **how):
    worker.send(Packet("server0", messages, payloads, for_server=True), **how)


def reply(server, messages, payloads=(), to="worker0", **how):
    server.send(Packet(to, messages, payloads), **how)


def packets_of(events):
    return [event for event in events if isinstance(event, Packet)]


def closed_of(events):
    return [event.peer for event in events if isinstance(event, Closed)]


def receive(mailbox, *others, count=1, seconds=SECONDS):
    """Every mailbox has a thread that receives; here they take turns."""
    packets, end = [], time.monotonic() + seconds
    while len(packets) < count and time.monotonic() < end:
        for other in others:
            other.receive(0.0)
        packets += packets_of(mailbox.receive(0.01))
    return packets


def let_in(worker, *servers, seconds=SECONDS):
    end = time.monotonic() + seconds
    while worker._calls and time.monotonic() < end:
        for mailbox in (worker, *servers):
            mailbox.receive(0.01)


WAYS = ["unix", "tcp", "encrypted"]


def make(name, way="tcp", key="secret"):
    return Mailbox(name, KINDS, JobKey(key), encrypted=way == "encrypted")


def connected(way):
    """A server and a worker that know the same key."""
    server, worker = make("server0", way), make("worker0", way)
    endpoint = server.listen("" if way == "unix" else "127.0.0.1")
    worker.connect("server0", endpoint)
    let_in(worker, server)
    return server, worker, endpoint


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def pair(way):
    server, worker, endpoint = connected(way)
    yield server, worker, endpoint
    worker.close()
    server.close()


def test_messages_and_payloads_go_both_ways(pair):
    server, worker, _ = pair
    send(worker, [push(3)], [memoryview(b"gradient" * 10000)])
    (packet,) = receive(server, worker)
    assert packet.peer == "worker0"
    assert packet.for_server
    assert packet.messages == [push(3)]
    assert bytes(packet.payloads[0]) == b"gradient" * 10000
    reply(server, [Answer(3, 2), Answer(4, 2)], [b"weights"])
    (packet,) = receive(worker, server)
    assert not packet.for_server
    assert [answer.chunk for answer in packet.messages] == [3, 4]
    assert bytes(packet.payloads[0]) == b"weights"


def test_a_worker_with_another_key_is_refused(pair, way):
    server, _, endpoint = pair
    other = make("worker1", way, "guess")
    other.connect("server0", endpoint)
    send(other, [push(worker=1)])
    with pytest.raises(ExchangeError, match=r"worker1 and server0 .* do not know the same key"):
        let_in(other, server)
    assert server.refused > 0
    assert not receive(server, seconds=0.3)
    other.abandon()


def test_a_worker_that_would_speak_in_the_clear_is_refused():
    """Both ends decide alike whether they encrypt, and the proof covers it."""
    server, worker = make("server0", "encrypted"), make("worker0", "tcp")
    worker.connect("server0", server.listen("127.0.0.1"))
    with pytest.raises(ExchangeError, match="do not know the same key"):
        let_in(worker, server)
    worker.abandon()
    server.close()


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"\x10\0\0\0 not a hello at all", b"\xff" * 5000]
)
def test_a_caller_that_does_not_begin_as_a_member_is_refused(words):
    server = make("server0")
    host, port = server.listen("127.0.0.1").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as line:
        line.sendall(words)
        events, end = [], time.monotonic() + SECONDS
        while not server.refused and time.monotonic() < end:
            events += server.receive(0.05)
        assert (events, server.refused) == ([], 1)
    server.close()


def test_nonsense_from_a_member_closes_its_connection_and_is_not_unpickled(pair):
    server, worker, _ = pair
    channel = worker._servers["server0"]
    channel.put(b"\x80\x04cos\nsystem\n.")
    worker._write(channel)
    events, end = [], time.monotonic() + SECONDS
    while not events and time.monotonic() < end:
        events = server.receive(0.01)
    (event,) = events
    assert event.peer == "worker0"
    assert "cannot be read" in event.why


def test_packets_of_all_sizes_keep_their_order_and_their_bytes(pair):
    """Heads longer than the buffer they are read into, payloads larger than what a socket takes,
    and sizes around a record's."""
    server, worker, _ = pair
    record = RECORD_BYTES
    sizes = [
        0,
        1,
        4095,
        4096,
        4097,
        70_000,
        record - 1,
        record,
        record + 1,
        3_000_000,
        5,
        12_000_000,
    ]
    for number, size in enumerate(sizes):
        pushes = [push(chunk=number)] * (20_000 if number == 4 else 1)
        send(worker, pushes, [bytes([number]) * size, b"and one more"])
    packets = receive(server, worker, count=len(sizes))
    for number, (size, packet) in enumerate(zip(sizes, packets, strict=True)):
        assert [push.chunk for push in packet.messages] == [number] * len(packet.messages)
        assert len(packet.messages) == (20_000 if number == 4 else 1)
        assert bytes(packet.payloads[0]) == bytes([number]) * size
        assert bytes(packet.payloads[1]) == b"and one more"


def test_a_payload_is_received_where_it_belongs(pair):
    server, worker, _ = pair
    weights = bytearray(500_000)
    reply(server, [Answer(3, 2)], [b"w" * 500_000])
    reply(server, [Answer(3, 2)], [b"of another size"])
    reply(server, [Answer(4, 2)], [b"v" * 500_000])
    packets, end = [], time.monotonic() + SECONDS
    while len(packets) < 3 and time.monotonic() < end:
        server.receive(0.0)
        packets += worker.receive(
            0.01, lambda messages: memoryview(weights) if messages[0].chunk == 3 else None
        )
    assert packets[0].payloads == [None]
    assert bytes(packets[1].payloads[0]) == b"of another size"
    assert bytes(packets[2].payloads[0]) == b"v" * 500_000
    assert weights == b"w" * 500_000


def test_a_tracked_packet_departs_when_the_network_takes_it(pair):
    """The server does not read, so the network takes some and not all; then the rest, in order."""
    server, worker, _ = pair
    pushes = [push(chunk=number) for number in range(60)]
    for each in pushes:
        send(worker, [each], [b"g" * 2_000_000], tracked=each.chunk % 2 == 0)
    worker.receive(0.0)
    departed = worker.departures()
    assert len(departed) < 30
    packets, end = [], time.monotonic() + SECONDS
    while len(packets) < len(pushes) and time.monotonic() < end:
        worker.receive(0.0)
        departed += worker.departures()
        packets += server.receive(0.01)
    assert [packet.messages for packet in packets] == [[each] for each in pushes]
    assert departed == [[each] for each in pushes[::2]]


def test_a_departure_ends_a_wait():
    server, worker, _ = connected("tcp")
    send(worker, [push()], tracked=True)
    began = time.monotonic()
    worker.receive(30.0)
    assert time.monotonic() - began < 30
    assert worker.departures() == [[push()]]
    worker.close()
    server.close()


def test_a_copied_reply_does_not_follow_its_memory(pair):
    server, worker, _ = pair
    send(worker, [push()])
    receive(server, worker)
    weights = bytearray(b"1" * 20_000_000)
    reply(server, [Answer(0, 1)], [memoryview(weights)], copied=True)
    weights[:] = b"2" * 20_000_000
    (packet,) = receive(worker, server)
    assert bytes(packet.payloads[0]) == b"1" * 20_000_000


def test_close_sends_what_is_still_to_be_sent(way):
    """Also by a mailbox that the server has not let in yet."""
    server, worker = make("server0", way), make("worker0", way)
    worker.connect("server0", server.listen("" if way == "unix" else "127.0.0.1"))
    pushes = [push(chunk=number) for number in range(7)]
    for each in pushes:
        send(worker, [each], [b"g" * 3_000_000])
    assert worker._servers["server0"].unsent
    closing = threading.Thread(target=worker.close)
    closing.start()
    packets = receive(server, count=len(pushes))
    closing.join()
    assert [packet.messages for packet in packets] == [[each] for each in pushes]
    assert all(bytes(packet.payloads[0]) == b"g" * 3_000_000 for packet in packets)
    server.close()


def test_a_socket_of_one_host_leaves_no_file():
    server = make("server0")
    name = server.listen()
    assert name.startswith("@"), "in the abstract name space"
    assert not os.path.exists(name)
    server.close()


def test_wake_ends_a_wait():
    mailbox = make("worker0")
    mailbox.wake()
    began = time.monotonic()
    assert mailbox.receive(30.0) == []
    assert time.monotonic() - began < 30
    mailbox.close()


def test_a_reply_to_a_worker_that_has_left_is_dropped(pair, way):
    server, worker, endpoint = pair
    reply(server, [Answer(0, 0)], to="worker9")
    leaver = make("worker1", way)
    leaver.connect("server0", endpoint)
    let_in(leaver, server)
    send(leaver, [push(worker=1)])
    receive(server, leaver)
    leaver.close()
    receive(server, seconds=0.1)
    for _ in range(3):
        reply(server, [Answer(0, 0)], [b"weights"], to="worker1")
    reply(server, [Answer(0, 1)])
    assert [packet.messages for packet in receive(worker, server)] == [[Answer(0, 1)]]


def receive_until_closed(mailbox, seconds=SECONDS):
    events, end = [], time.monotonic() + seconds
    while not closed_of(events) and time.monotonic() < end:
        events += mailbox.receive(0.05)
    return events


def test_a_worker_that_is_gone_is_reported_after_all_that_it_had_sent(pair, way):
    server, worker, endpoint = pair
    leaver = make("worker1", way)
    leaver.connect("server0", endpoint)
    let_in(leaver, server)
    pushes = [push(chunk=number, worker=1) for number in range(200)]
    for each in pushes:
        send(leaver, [each], [b"gradient" * 100])
    closing = threading.Thread(target=leaver.close)
    closing.start()
    events = receive_until_closed(server)
    closing.join()
    assert [packet.messages for packet in events[:-1]] == [[each] for each in pushes]
    assert events[-1] == Closed("worker1")
    send(worker, [pushes[0]])
    assert receive(server)[0].peer == "worker0", "it has not gone"


def test_bytes_that_a_leaving_worker_has_not_read_take_nothing_back_that_it_sent(way):
    """The kernel drops what it has still to send when a socket is closed with unread bytes."""
    server, worker, _ = connected(way)
    pushes = [push(chunk=number) for number in range(400)]
    for each in pushes:
        send(worker, [each], [bytes(100_000)])
    early = packets_of(server.receive(0.1))
    reply(server, [Answer(0, 1)], [b"weights" * 1000])
    closing = threading.Thread(target=worker.close)
    closing.start()
    events = receive_until_closed(server)
    closing.join()
    server.close()
    assert [packet.messages for packet in early + events[:-1]] == [[each] for each in pushes]


def test_the_last_words_of_a_server_are_heard_before_it_is_reported(way):
    """Also by a worker that has so much to send that it notices first that the server is deaf."""
    server, worker, _ = connected(way)
    send(worker, [push()])
    receive(server)
    reply(server, [Answer(0, 1)], [b"weights"])
    server.receive(0.0)
    server.close()
    for number in range(20):
        send(worker, [push(chunk=number)], [b"g" * 100_000])
    packet, closed = receive_until_closed(worker)
    assert packet.messages == [Answer(0, 1)]
    assert closed == Closed("server0")
    send(worker, [push()])
    assert worker.receive(0.1) == []
    worker.close()


def test_a_server_that_is_not_there_is_named():
    worker = make("worker0")
    with pytest.raises(ExchangeError, match="worker0 cannot reach server0 at @nobody"):
        worker.connect("server0", "@nobody")
    worker.close()


def test_what_a_forked_process_abandons_stays_open(pair):
    server, worker, _ = pair
    child = os.fork()
    if child == 0:
        worker.abandon()
        server.abandon()
        os._exit(0)
    os.waitpid(child, 0)
    send(worker, [push(7)])
    (packet,) = receive(server, worker)
    assert packet.messages == [push(7)]


def test_proofs_differ_by_purpose_name_and_key():
    key = JobKey("k")
    proof = key.derive(b"initiator", b"worker0", b"server0")
    assert key.matches(proof, b"initiator", b"worker0", b"server0")
    assert not key.matches(proof, b"responder", b"worker0", b"server0")
    assert not key.matches(proof, b"initiator", b"worker1", b"server0")
    assert not key.matches(proof, b"initiator", b"worker", b"0server0")
    assert not JobKey("l").matches(proof, b"initiator", b"worker0", b"server0")
