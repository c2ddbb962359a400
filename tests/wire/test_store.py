"""The job's store: notes for members alone."""

import socket
import threading
import time

import msgspec
import pytest

from paceline.errors import DeadlineError, ExchangeError
from paceline.wire import JobKey, StoreClient, StoreKeeper
from paceline.wire.handshake import AT_ONCE, Caller, Lobby
from paceline.wire.sealing import LENGTH, Seal
from paceline.wire.store import Add, Check, Delete, Get, Set, Wait

KEY = JobKey("secret")


@pytest.fixture
def keeper():
    made = StoreKeeper(socket.create_server(("127.0.0.1", 0), backlog=1024), KEY)
    yield made
    made.close()


def client(keeper, key=KEY, name="worker0", seconds=20.0):
    address, port = keeper.address
    return StoreClient(address, int(port), key, name, seconds)


def call(keeper):
    address, port = keeper.address
    return socket.create_connection((address, int(port)), timeout=10)


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_notes_are_left_and_found(keeper):
    one, other = client(keeper), client(keeper, name="worker1")
    assert one.ask(Check(["a"]), 30) is False
    one.ask(Set("a", b"\x00\xff" * 100_000), 30)
    assert other.ask(Get("a"), 30) == b"\x00\xff" * 100_000
    assert other.ask(Check(["a"]), 30) is True
    assert other.ask(Add("count", 2), 30) == 2
    assert one.ask(Add("count", 3), 30) == 5
    assert one.ask(Delete("a"), 30) is True
    assert one.ask(Check(["a"]), 30) is False
    one.close()
    other.close()


def test_a_note_is_waited_for_and_others_go_on_meanwhile(keeper):
    one = client(keeper)
    found = []
    waiting = [
        threading.Thread(target=lambda: found.append(one.ask(Get("late"), 20))),
        threading.Thread(target=lambda: found.append(one.ask(Wait(["late", "a"]), 20))),
    ]
    for thread in waiting:
        thread.start()
    until(lambda: len(keeper._waiting) == 2)
    one.ask(Set("a", b""), 30)
    one.ask(Set("late", b"here"), 30)
    for thread in waiting:
        thread.join(10)
    assert sorted(found, key=str) == [None, b"here"] or sorted(found, key=str) == [b"here", None]
    one.close()


def test_who_waits_in_vain_is_told_and_forgotten(keeper):
    one = client(keeper)
    with pytest.raises(TimeoutError):
        one.ask(Get("never"), 0.1)
    until(lambda: not keeper._waiting)
    one.ask(Set("never", b"now"), 30)
    assert one.ask(Get("never"), 30) == b"now"
    one.close()


def test_a_keeper_that_is_gone_is_an_error_at_once(keeper):
    one = client(keeper)
    keeper.close()
    with pytest.raises(OSError, match=r"closed|refused|reset|pipe"):
        one.ask(Get("a"), 20)
    one.close()


def test_another_key_is_told_so(keeper):
    with pytest.raises(ExchangeError, match="same PACELINE_KEY"):
        client(keeper, JobKey("guess"))
    until(lambda: keeper.refused == 1)


def test_who_listens_there_but_is_no_store_is_told_so():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            line, _ = listener.accept()
            with line:
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ExchangeError, match="not the job's store"):
            StoreClient("127.0.0.1", listener.getsockname()[1], KEY, "worker0", 10)
        thread.join()


def test_nobody_there_is_waited_for_until_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(DeadlineError, match="missing: worker0"):
        StoreClient("127.0.0.1", port, KEY, "worker1", 0.3)


NESTED = b"\x94\xa7worker0\xc4\0\xc4\0" + b"\x91" * 1000
"""A hello with a fourth part: a list in a list, deeper than a decoder goes."""


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 5000,
        b"\0\0\0\0" * 100,
        b"\x64\0\0\0half a hello",
        LENGTH.pack(len(NESTED)) + NESTED,
    ],
)
def test_a_stranger_is_refused_and_costs_nothing(keeper, words):
    one = client(keeper)
    one.ask(Set("a", b"0"), 30)  # it is in: only strangers have little time
    keeper._lobby = Lobby(seconds=0.2)
    with call(keeper) as line:
        line.sendall(words)
        until(lambda: keeper.refused == 1)
    one.ask(Set("a", b"1"), 30)
    one.close()


def test_silent_connections_hold_up_nobody(keeper):
    silent = [call(keeper) for _ in range(2 * AT_ONCE)]
    one = client(keeper)
    one.ask(Set("a", b"1"), 30)
    assert len(keeper._lobby) <= AT_ONCE
    one.close()
    for line in silent:
        line.close()


def test_what_is_said_is_covered_and_a_change_is_noticed(keeper):
    """On the wire: no note in the clear; a frame that was changed or is played again ends it."""
    with call(keeper) as line:
        caller = Caller(KEY, "worker0", "store")
        line.recv(LENGTH.size)
        hello = caller.answer(line.recv(32))
        line.sendall(LENGTH.pack(len(hello)) + hello)
        assert caller.accepts(line.recv(1000)[LENGTH.size :])
        seal = Seal(caller.session(), "request")
        frame = seal.close(msgspec.msgpack.encode(Set("weights", b"secret numbers")))
        assert b"weights" not in frame
        assert b"secret" not in frame
        line.sendall(frame)
        assert line.recv(1000)
        line.sendall(frame)
        assert line.recv(1000) == b"", "played again"
    assert keeper._notes == {"weights": b"secret numbers"}


def test_a_seal_opens_only_what_comes_next():
    session = b"s" * 32
    frames = [Seal(session, "request").close(b"one")[LENGTH.size :]]
    seal = Seal(session, "request")
    assert seal.open(frames[0]) == b"one"
    for wrong in (frames[0], b"", b"x" * 40):
        with pytest.raises(ExchangeError):
            seal.open(wrong)
    with pytest.raises(ExchangeError):
        Seal(session, "answer").open(frames[0])
    changed = bytearray(frames[0])
    changed[-1] ^= 1
    with pytest.raises(ExchangeError):
        Seal(session, "request").open(bytes(changed))
