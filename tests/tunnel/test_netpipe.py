"""The curve of latency and bandwidth, between processes and between emulated hosts."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.errors import DeadlineError, ExchangeError
from paceline.spec import parse_link
from paceline.tunnel import agents, netpipe

SIZES = (1, 1024, 65536)


@pytest.fixture
def agent() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=netpipe.serve, args=(listener, "secret"))
        thread.start()
        yield "127.0.0.1", listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_every_size_is_measured_in_one_and_both_directions(agent):
    rows = netpipe.measure(agent, SIZES, "secret")
    assert [row["bytes"] for row in rows] == list(SIZES)
    for row in rows:
        half = row["round_trip_seconds"] / 2
        assert 0 < row["bits_per_second"] <= 8 * row["bytes"] / half + 1
        assert row["both_bits_per_second"] > 0


def test_a_stranger_is_refused(agent):
    with pytest.raises(ExchangeError, match="another key"):
        netpipe.measure(agent, SIZES, "guess")


@pytest.mark.parametrize(
    "body",
    [b"\xff" * 64, '{"proof": "\u00e4"}'.encode(), b"[" * 100_000, b'{"proof": "\\ud800"}'],
    ids=["bytes", "no ASCII", "nested", "half a character"],
)
def test_nonsense_does_not_end_an_agent(agent, body, monkeypatch):
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    with socket.create_connection(agent) as stranger, stranger.makefile("rb") as answers:
        stranger.sendall(len(body).to_bytes(4, "big") + body)
        stranger.shutdown(socket.SHUT_WR)
        answers.read()
    assert netpipe.ask(agent, {"verb": "hello"}, "secret")["pid"]
    assert not ended


def test_a_crowd_that_says_nothing_gets_so_many_threads_and_no_more(agent, monkeypatch):
    monkeypatch.setattr(netpipe, "_PROVING_SECONDS", 0.2)
    before = threading.active_count()
    with contextlib.ExitStack() as crowd:
        for _ in range(100):
            crowd.enter_context(socket.create_connection(agent))
        assert threading.active_count() <= before + netpipe._STRANGERS
        assert netpipe.ask(agent, {"verb": "hello"}, "secret")["pid"]


def test_an_agent_asked_for_a_peer_that_is_not_there_says_so(agent):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ExchangeError, match="refused"):
        netpipe.ask_pair({"a": agent, "b": ("127.0.0.1", port)}, "a", "b", SIZES, "secret")


def test_a_missing_agent_is_named():
    with pytest.raises(DeadlineError, match="nobody"):
        netpipe.wait_for({"nobody": ("127.0.0.1", 1)}, "secret", seconds=0.1)


def test_pairs_of_this_machine():
    (pair,) = agents.local_pairs((1, 4096))
    assert (pair["from"], pair["to"]) == ("process0", "process1")
    assert [row["bytes"] for row in pair["rows"]] == [1, 4096]


@pytest.mark.tunnel
def test_all_pairs_of_emulated_hosts(rights):
    sizes = (1, 1 << 16, 1 << 18, 1 << 20)
    found = list(agents.tunnel_pairs(3, parse_link("100mbit", "test"), sizes))
    assert [(p["from"], p["to"]) for p in found] == [
        ("host0", "host1"),
        ("host0", "host2"),
        ("host1", "host2"),
    ]
    for pair in found:
        # No direction is faster than its cable, though an idle one saves up for a burst.
        assert all(row["bits_per_second"] < 1.05 * 1e8 for row in pair["rows"])
    json.dumps(found)
