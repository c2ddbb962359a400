"""A peer without the key gets in nowhere, learns nothing and holds up no member."""

import resource
import socket
import struct
import threading
import time

import pytest

from paceline.protocol.messages import Answer, Push
from paceline.wire import JobKey, Mailbox, Packet
from paceline.wire.channel import LENGTH
from paceline.wire.handshake import NONCE_BYTES, Initiator, Responder
from paceline.wire.listener import ACCEPTED_AT_ONCE, AT_ONCE, PAUSE_SECONDS, UnauthenticatedPeers

KINDS = Push | Answer
PUSH = Push(worker=0, chunk=3, step=1, version=1)
SECONDS = 60.0


@pytest.fixture
def server():
    mailbox = Mailbox("server0", KINDS, JobKey("secret"))
    yield mailbox
    mailbox.close()


def call(endpoint):
    host, port = endpoint.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def serve(mailbox, seconds):
    packets, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        packets += mailbox.receive(0.01)
    return packets


def serve_until(mailbox, condition, seconds=SECONDS):
    """However many turns that takes."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        mailbox.receive(0.01)


def member_gets_through(server, endpoint, seconds=SECONDS):
    """A worker's push arrives."""
    worker = Mailbox("worker0", KINDS, JobKey("secret"))
    worker.connect("server0", endpoint)
    worker.send(Packet("server0", [PUSH], [b"gradient"], for_server=True))
    packets, end = [], time.monotonic() + seconds
    while not packets and time.monotonic() < end:
        worker.receive(0.0)
        packets += server.receive(0.01)
    worker.close()
    return [(packet.peer, packet.messages) for packet in packets] == [("worker0", [PUSH])]


def test_connections_that_are_reset_at_once_hurt_nobody(server):
    endpoint = server.listen("127.0.0.1")
    for _ in range(200):
        line = call(endpoint)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.close()  # a reset, before or after it is accepted
        server.receive(0.0)
    assert member_gets_through(server, endpoint)


def test_silent_connections_are_few_and_a_member_still_gets_in(server):
    endpoint = server.listen("127.0.0.1")
    silent = []
    for _ in range(2 * AT_ONCE):
        silent.append(call(endpoint))
        server.receive(0.0)
    serve_until(server, lambda: server.refused >= AT_ONCE)
    assert len(server._listener._channels) <= AT_ONCE
    assert member_gets_through(server, endpoint)
    for line in silent:
        line.close()


def test_half_a_hello_is_not_waited_for(server, monkeypatch):
    endpoint = server.listen("127.0.0.1")
    server._listener.peers = UnauthenticatedPeers(seconds=0.1)
    with call(endpoint) as line:
        line.sendall(LENGTH.pack(100) + b"half")
        serve_until(server, lambda: server.refused == 1)
        assert not server._listener._channels
        received = line.recv(1000) + line.recv(1000)
        assert len(received) == LENGTH.size + NONCE_BYTES, "the challenge, then the end"


def test_a_large_announcement_is_refused_before_it_is_read(server):
    endpoint = server.listen("127.0.0.1")
    with call(endpoint) as line:
        line.sendall(b"\xff" * 16)
        serve_until(server, lambda: server.refused == 1)


def test_running_out_of_descriptors_is_survived(server):
    endpoint = server.listen("127.0.0.1")
    lines, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lines.extend(call(endpoint) for _ in range(40))
        in_use = max(line.fileno() for line in lines) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use, limits[1]))
        serve(server, 0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert member_gets_through(server, endpoint)
    for line in lines:
        line.close()


def test_a_hello_that_was_overheard_opens_nothing(server):
    """What a member said on one connection, word for word, on another."""
    endpoint, key = server.listen("127.0.0.1"), JobKey("secret")
    with call(endpoint) as line:
        serve_until(server, lambda: server._listener._channels)
        challenge = line.recv(1000)[LENGTH.size :]
        hello = Initiator(key, "worker0", "server0", False).answer(challenge)
        line.sendall(LENGTH.pack(len(hello)) + hello)
        serve_until(server, lambda: "worker0" in server._workers)
    serve_until(server, lambda: "worker0" not in server._workers)
    with call(endpoint) as line:
        line.sendall(LENGTH.pack(len(hello)) + hello)
        serve_until(server, lambda: server.refused == 1)
        assert "worker0" not in server._workers


def test_a_server_that_does_not_know_the_key_gets_nothing():
    """A worker sends no gradient before the other end has shown that it is a member too."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = Mailbox("worker0", KINDS, JobKey("secret"))
        worker.connect("server0", f"127.0.0.1:{listener.getsockname()[1]}")
        worker.send(Packet("server0", [PUSH], [b"gradient" * 100], for_server=True))
        line, _ = listener.accept()
        with line:
            line.sendall(LENGTH.pack(32) + b"c" * 32)
            serve(worker, 0.2)
            line.sendall(LENGTH.pack(32) + b"p" * 32)
            with pytest.raises(Exception, match="do not know the same key"):
                serve(worker, SECONDS)
            line.settimeout(SECONDS)
            assert b"gradient" not in line.recv(10_000)
        worker.abandon()


def test_a_member_calls_again_when_the_door_was_crowded(server):
    endpoint, key = server.listen("127.0.0.1"), JobKey("secret")
    server._listener.peers = UnauthenticatedPeers(at_once=1)
    worker = Mailbox("worker0", KINDS, key)
    worker.connect("server0", endpoint)
    worker.send(Packet("server0", [PUSH], [b"gradient"], for_server=True))
    serve_until(server, lambda: server._listener._channels)
    with call(endpoint):  # takes the worker's place before it has answered
        serve_until(server, lambda: server.refused == 1)
    packets, end = [], time.monotonic() + SECONDS
    while not packets and time.monotonic() < end:
        worker.receive(0.01)
        packets += server.receive(0.01)
    assert bytes(packets[0].payloads[0]) == b"gradient"
    worker.close()


def test_a_flood_of_strangers_holds_up_no_packet(server):
    endpoint, stop = server.listen("127.0.0.1"), threading.Event()

    def flood():
        while not stop.is_set():
            try:
                with call(endpoint) as line:
                    line.sendall(b"\x05\0\0\0abc")
            except OSError:
                pass

    threads = [threading.Thread(target=flood) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert member_gets_through(server, endpoint)
    finally:
        stop.set()
        for thread in threads:
            while thread.is_alive():
                server.receive(0.01)
            thread.join()


@pytest.mark.parametrize("encrypted", [False, True])
def test_each_end_proves_itself_to_the_other(encrypted):
    key = JobKey("secret")
    initiator = Initiator(key, "worker0", "server0", encrypted)
    responder = Responder(key, "server0", encrypted)
    welcome = responder.answer(initiator.answer(responder.challenge))
    initiator.answer(welcome)
    assert (responder.peer, responder.done, initiator.done) == ("worker0", True, True)
    if encrypted:
        assert initiator.keys.send == responder.keys.receive != initiator.keys.receive
        assert initiator.keys.receive == responder.keys.send
    again = Initiator(key, "worker0", "server0", encrypted)
    again.answer(responder.challenge)
    again.answer(welcome)
    assert again.refused, "a proof holds for one pair of numbers"


def test_one_that_calls_another_member_is_not_told_that_its_key_is_wrong():
    """An address was used again; it calls again, as one that was crowded out."""
    key = JobKey("secret")
    responder = Responder(key, "server1", False)
    assert responder.answer(Initiator(key, "w", "server0", False).answer(b"c" * 32)) is None
    assert responder.refused
    stranger = Responder(key, "server1", False)
    hello = Initiator(JobKey("other"), "w", "server1", False).answer(stranger.challenge)
    assert stranger.answer(hello) == b"", "refused at once"


def test_session_keys_change_with_every_connection():
    """A job's key that leaks later opens nothing that was recorded: the exchange is ephemeral."""
    key, seen = JobKey("secret"), set()
    for _ in range(10):
        initiator, responder = Initiator(key, "w", "s", True), Responder(key, "s", True)
        responder.challenge = b"c" * 32
        responder.answer(initiator.answer(responder.challenge))
        seen |= {responder.keys.send, responder.keys.receive}
    assert len(seen) == 20


def test_the_oldest_goes_for_one_more_and_the_overdue_are_known():
    now = [0.0]
    peers = UnauthenticatedPeers(at_once=2, seconds=5.0, clock=lambda: now[0])
    assert peers.add("a") is None
    now[0] = 1.0
    assert peers.add("b") is None
    assert peers.timeout(100.0) == 4.0
    assert peers.add("c") == "a"
    now[0] = 6.0
    assert peers.overdue() == ["b", "c"]
    assert peers.timeout(100.0) == 100.0


def test_a_flood_is_accepted_no_faster_than_the_limit(server):
    endpoint = server.listen("127.0.0.1")
    lines = [call(endpoint) for _ in range(4 * ACCEPTED_AT_ONCE)]
    began, listener = time.monotonic(), server._listener
    while len(listener.peers) + server.refused < len(lines):
        server.receive(0.0)
    assert time.monotonic() - began >= 3 * PAUSE_SECONDS
    for line in lines:
        line.close()
