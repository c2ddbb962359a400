"""The job's store: notes for members alone."""

import socket
import threading
import time

import pytest

from paceline.errors import DeadlineError, ExchangeError
from paceline.wire import JobKey, StoreClient, StoreKeeper
from paceline.wire.channel import LENGTH
from paceline.wire.listener import AT_ONCE, UnauthenticatedPeers
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


def test_another_service_at_the_address_is_said_to_be_none_of_the_job():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            line, _ = listener.accept()
            with line:
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ExchangeError, match="is not store of this job"):
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
    keeper._mailbox._listener.peers = UnauthenticatedPeers(seconds=0.2)
    with call(keeper) as line:
        line.sendall(words)
        until(lambda: keeper.refused == 1)
    one.ask(Set("a", b"1"), 30)
    one.close()


def test_silent_connections_hold_up_nobody(keeper):
    silent = [call(keeper) for _ in range(2 * AT_ONCE)]
    one = client(keeper)
    one.ask(Set("a", b"1"), 30)
    assert len(keeper._mailbox._listener.peers) <= AT_ONCE
    one.close()
    for line in silent:
        line.close()


def test_a_request_that_cannot_be_read_ends_its_connection_and_no_other(keeper):
    one, other = client(keeper), client(keeper, name="worker1")
    one._idle[0].send(b"\x93 nonsense", time.monotonic() + 30)
    with pytest.raises(OSError, match="closed"):
        one.ask(Get("a"), 30)
    other.ask(Set("a", b"1"), 30)
    assert client(keeper).ask(Get("a"), 30) == b"1"
    other.close()


def test_a_large_note_arrives_and_leaves_no_large_buffer(keeper):
    one, note = client(keeper), bytes(range(256)) * 400_000
    one.ask(Set("weights", note), 60)
    assert one.ask(Get("weights"), 60) == note
    assert one.ask(Check(["weights"]), 30) is True
    assert len(one._idle[0]._channel._start) < 1 << 20
    one.close()
