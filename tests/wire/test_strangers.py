"""Who does not know the key gets in nowhere, learns nothing and holds up nobody."""

import resource
import socket
import struct
import threading
import time

import pytest

from paceline.protocol.messages import Answer, Push
from paceline.wire import JobKey, StreamMailbox, ZeroMqMailbox, handshake
from paceline.wire.connection import LENGTH
from paceline.wire.handshake import Callee, Caller, Lobby

KINDS = Push | Answer
PUSH = Push(worker=0, chunk=3, step=1, version=1)
SECONDS = 60.0


@pytest.fixture
def server():
    mailbox = StreamMailbox("server0", KINDS, JobKey("secret"))
    yield mailbox
    mailbox.close()


def call(endpoint):
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
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
    worker = type(server)("worker0", KINDS, JobKey("secret"))
    worker.connect("server0", endpoint)
    worker.send("server0", [PUSH], [b"gradient"])
    packets, end = [], time.monotonic() + seconds
    while not packets and time.monotonic() < end:
        worker.receive(0.0)
        packets += server.receive(0.01)
    worker.close()
    return [(packet.peer, packet.messages) for packet in packets] == [("worker0", [PUSH])]


def test_connections_that_are_reset_at_once_hurt_nobody(server):
    endpoint = server.bind("127.0.0.1")
    for _ in range(200):
        line = call(endpoint)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.close()  # a reset, before or after it is accepted
        server.receive(0.0)
    assert member_gets_through(server, endpoint)


def test_silent_connections_are_few_and_a_member_still_gets_in(server, monkeypatch):
    endpoint = server.bind("127.0.0.1")
    silent = []
    for _ in range(2 * handshake.AT_ONCE):
        silent.append(call(endpoint))
        server.receive(0.0)
    assert len(server._streams) <= handshake.AT_ONCE
    assert server.refused >= handshake.AT_ONCE
    assert member_gets_through(server, endpoint)
    for line in silent:
        line.close()


@pytest.fixture
def curve(monkeypatch):
    """Whoever is silent has minutes, so that who is sent away is so for another reason."""
    monkeypatch.setattr("paceline.wire.zeromq.HELLO_SECONDS", 3 * SECONDS)
    mailbox = ZeroMqMailbox("server0", KINDS, JobKey("secret"))
    yield mailbox
    mailbox.close()


def hung_up(line, seconds=SECONDS):
    """Whether the other end has closed."""
    line.settimeout(seconds)
    try:
        while line.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_silent_connections_to_zeromq_are_few_too(curve):
    endpoint = curve.bind("127.0.0.1")
    silent = []
    for _ in range(2 * handshake.AT_ONCE):
        silent.append(call(endpoint))
        curve.receive(0.0)
    serve_until(curve, lambda: curve.refused == handshake.AT_ONCE)
    assert len(curve._strangers) == handshake.AT_ONCE
    assert hung_up(silent[0]), "before its time is over"
    assert not hung_up(silent[-1], 0.1)
    assert member_gets_through(curve, endpoint)
    for line in silent:
        line.close()


def test_a_member_that_was_crowded_out_of_zeromq_calls_again(curve, monkeypatch):
    """It is hung up on before it has shown that it is one."""
    monkeypatch.setattr("paceline.wire.zeromq.AT_ONCE", 0)
    endpoint = curve.bind("127.0.0.1")
    worker = ZeroMqMailbox("worker0", KINDS, JobKey("secret"))
    worker.connect("server0", endpoint)
    worker.send("server0", [PUSH], [b"gradient"])
    end = time.monotonic() + SECONDS
    while not curve.refused and time.monotonic() < end:
        worker.receive(0.0)
        curve.receive(0.01)
    assert curve.refused
    monkeypatch.setattr("paceline.wire.zeromq.AT_ONCE", 128)
    packets = []
    while not packets and time.monotonic() < end:
        worker.receive(0.01)
        packets += curve.receive(0.01)
    assert bytes(packets[0].payloads[0]) == b"gradient"
    assert not worker.lost
    assert not curve.lost
    worker.close()


def test_zeromq_does_not_read_what_announces_too_much(curve):
    curve.largest_bytes = 1000
    endpoint = curve.bind("127.0.0.1")
    with call(endpoint) as line:
        signature = b"\xff\0\0\0\0\0\0\0\x01\x7f"
        line.sendall(signature + b"\x03\0" + b"CURVE".ljust(20, b"\0") + bytes(32))
        line.sendall(b"\x06" + struct.pack(">Q", 1001) + b"\x05HELLO")
        assert hung_up(line), "long before its time is over"


def test_half_a_hello_is_not_waited_for(server, monkeypatch):
    server._lobby = Lobby(seconds=0.1)
    endpoint = server.bind("127.0.0.1")
    with call(endpoint) as line:
        line.sendall(LENGTH.pack(100) + b"half")
        serve_until(server, lambda: server.refused == 1)
        assert not server._streams
        received = line.recv(1000) + line.recv(1000)
        assert len(received) == LENGTH.size + handshake.NONCE_BYTES, "the challenge, then the end"


def test_a_large_announcement_is_refused_before_it_is_read(server):
    endpoint = server.bind("127.0.0.1")
    with call(endpoint) as line:
        line.sendall(b"\xff" * 16)
        serve_until(server, lambda: server.refused == 1)


def test_running_out_of_descriptors_is_survived(server):
    endpoint = server.bind("127.0.0.1")
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
    endpoint, key = server.bind("127.0.0.1"), JobKey("secret")
    with call(endpoint) as line:
        serve_until(server, lambda: server._streams)
        challenge = line.recv(1000)[LENGTH.size :]
        hello = Caller(key, "worker0", "server0").answer(challenge)
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
        worker = StreamMailbox("worker0", KINDS, JobKey("secret"))
        worker.connect("server0", f"127.0.0.1:{listener.getsockname()[1]}")
        worker.send("server0", [PUSH], [b"gradient" * 100])
        line, _ = listener.accept()
        with line:
            line.sendall(LENGTH.pack(32) + b"c" * 32)
            serve(worker, 0.2)
            line.sendall(LENGTH.pack(32) + b"p" * 32)
            with pytest.raises(Exception, match="do not know the same key"):
                serve(worker, SECONDS)
            line.settimeout(SECONDS)
            assert b"gradient" not in line.recv(10_000)
        worker._servers["server0"].unsent.clear()
        worker.close()


def test_a_member_calls_again_when_the_door_was_crowded(server):
    server._lobby = Lobby(at_once=1)
    endpoint, key = server.bind("127.0.0.1"), JobKey("secret")
    worker = StreamMailbox("worker0", KINDS, key)
    worker.connect("server0", endpoint)
    worker.send("server0", [PUSH], [b"gradient"])
    serve_until(server, lambda: server._streams)
    with call(endpoint):  # takes the worker's place before it has answered
        serve_until(server, lambda: server.refused == 1)
    packets, end = [], time.monotonic() + SECONDS
    while not packets and time.monotonic() < end:
        worker.receive(0.01)
        packets += server.receive(0.01)
    assert bytes(packets[0].payloads[0]) == b"gradient"
    worker.close()


def test_a_flood_of_strangers_holds_up_no_packet(server):
    endpoint, stop = server.bind("127.0.0.1"), threading.Event()

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


def test_each_end_proves_itself_to_the_other():
    key = JobKey("secret")
    caller, callee = Caller(key, "worker0", "server0"), Callee(key, "server0")
    proof = callee.welcome(caller.answer(callee.challenge))
    assert callee.caller == "worker0"
    assert caller.accepts(proof)
    assert caller.session() == callee.session()
    assert Callee(key, "server1").welcome(Caller(key, "w", "server0").answer(b"c" * 32)) is None
    again = Caller(key, "worker0", "server0")
    again.answer(callee.challenge)
    assert not again.accepts(proof), "a proof holds for one pair of numbers"


def test_a_lobby_lets_the_first_go_for_one_more_and_knows_who_is_overdue():
    now = [0.0]
    lobby = Lobby(at_once=2, seconds=5.0, clock=lambda: now[0])
    assert lobby.enter("a") is None
    now[0] = 1.0
    assert lobby.enter("b") is None
    assert lobby.timeout(100.0) == 4.0
    assert lobby.enter("c") == "a"
    now[0] = 6.0
    assert lobby.overdue() == ["b", "c"]
    assert lobby.timeout(100.0) == 100.0
