"""Members as threads examine each other over loopback: what they find, and who is missing."""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from paceline.diagnose.doctor import Examination, Requirements, examine, findings, gather
from paceline.diagnose.doctor.examination import CALLERS_AT_ONCE
from paceline.diagnose.doctor.probes import VISITORS_AT_ONCE, Door, Target, probe
from paceline.errors import DeadlineError, SpecError
from paceline.launch import Identity

KEY = "k" * 64


def identities(members: int, port: int, key: str = KEY) -> list[Identity]:
    return [
        Identity(
            index=index,
            workers=members,
            host=f"host{index}",
            coordinator=f"127.0.0.1:{port}",
            local_index=index,
            local_members=members,
            key=key,
        )
        for index in range(members)
    ]


def run(
    members: list[Identity],
    listener: socket.socket,
    clocks: dict[int, Callable[[], float]] | None = None,
    deadline_seconds: float = 20.0,
) -> dict[int, Examination | Exception]:
    """Each member's result, or what it raised."""
    results: dict[int, Examination | Exception] = {}
    facts = {m.index: gather(m, {**os.environ, "OMP_NUM_THREADS": "1"}) for m in members}

    def attend(identity: Identity) -> None:
        try:
            results[identity.index] = examine(
                identity,
                facts[identity.index],
                listener=listener if identity.index == 0 else None,
                bandwidth=False,
                deadline_seconds=deadline_seconds,
                clock=(clocks or {}).get(identity.index, time.time),
            )
        except Exception as error:
            results[identity.index] = error

    threads = [threading.Thread(target=attend, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_all_pairs_are_probed_and_all_members_know_the_same(listener: socket.socket) -> None:
    results = run(identities(4, port_of(listener)), listener)
    first = results[0]
    assert isinstance(first, Examination)
    assert all(result == first for result in results.values())
    assert {(p.source, p.target) for p in first.pairs} == {
        (f"worker{i}", f"worker{j}") for i in range(4) for j in range(4) if i != j
    }
    assert all(pair.problem == "" for pair in first.pairs)
    assert all(pair.round_trip_seconds for pair in first.pairs)
    wrong = [
        f for f in findings(first, Requirements(shared_memory_bytes=0)) if f.severity == "error"
    ]
    assert wrong == []


def test_a_clock_that_is_two_seconds_off_is_named(listener: socket.socket) -> None:
    clocks = {1: lambda: time.time() + 2.0}
    result = run(identities(3, port_of(listener)), listener, clocks)[0]
    assert isinstance(result, Examination)
    (finding,) = [f for f in findings(result) if f.kind == "clock"]
    assert finding.members == ["worker1"]
    told = re.search(r"(\d\.\d\d) s ahead of worker0's", finding.problem)
    assert told is not None, finding.problem
    assert float(told[1]) == pytest.approx(2.0, abs=0.5), "but for the time that asking takes"


def test_a_member_that_never_comes_is_named(listener: socket.socket) -> None:
    members = identities(3, port_of(listener))
    results = run([members[0], members[2]], listener, deadline_seconds=4.0)
    for index in (0, 2):
        result = results[index]
        assert isinstance(result, Examination)
        assert result.missing == ["worker1"]
        assert {(p.source, p.target) for p in result.pairs} == {
            ("worker0", "worker2"),
            ("worker2", "worker0"),
        }


def test_a_member_without_the_key_is_refused(listener: socket.socket) -> None:
    members = identities(2, port_of(listener))
    stranger = msgspec.structs.replace(members[1], key="another")
    results = run([members[0], stranger], listener, deadline_seconds=1.0)
    first = results[0]
    assert isinstance(first, Examination)
    assert first.missing == ["worker1"]
    assert isinstance(results[1], DeadlineError)


def test_a_door_answers_only_those_who_know_the_token() -> None:
    door = Door(b"t" * 16)
    target = Target(member="worker1", address="127.0.0.1", port=door.port)
    try:
        good = probe("worker0", target, b"t" * 16, bandwidth=True)
        bad = probe("worker0", target, b"x" * 16, bandwidth=False)
    finally:
        door.close()
    assert good.problem == ""
    assert good.bandwidth_bits_per_second is not None
    assert bad.problem.startswith("it answered and then failed")
    closed = probe("worker0", target, b"t" * 16, bandwidth=False)
    assert closed.problem == "refused"


def a_hello(**changed: object) -> bytes:
    facts = gather(identities(2, 1)[1], os.environ)
    hello = {"index": 1, "proof": "0", "facts": msgspec.to_builtins(facts), "port": 1}
    return msgspec.json.encode({**hello, **changed})


STRANGE = {
    "nested": a_hello()[:-1] + b',"more":' + b"[" * 60_000,
    "no text": b'{"proof":"\xff"}',
    "a proof in other letters": a_hello(proof="\u00e9"),
    "a number too large": a_hello(index=10**15),
    "another protocol": b"GET / HTTP/1.1",
}


@pytest.mark.parametrize("words", STRANGE.values(), ids=STRANGE)
def test_what_a_stranger_says_costs_the_members_nothing(
    listener: socket.socket, words: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", port_of(listener))) as line:
        line.sendall(words + b"\n")
        results = run(identities(2, port_of(listener)), listener)
    assert isinstance(results[0], Examination), results
    assert results[0] == results[1]
    assert not results[0].missing


def test_a_crowd_of_silent_strangers_keeps_no_member_out(listener: socket.socket) -> None:
    members, results = identities(2, port_of(listener)), dict[int, Examination | Exception]()
    presiding = threading.Thread(target=lambda: results.update(run(members[:1], listener)))
    presiding.start()
    where = ("127.0.0.1", port_of(listener))
    crowd = [socket.create_connection(where) for _ in range(3 * CALLERS_AT_ONCE)]
    results |= run(members[1:], listener)
    presiding.join(timeout=60)
    for line in crowd:
        line.close()
    assert isinstance(results[0], Examination), results
    assert results[0] == results[1]


def test_silent_visitors_hold_up_nobody_at_a_door() -> None:
    door = Door(b"t" * 16)
    target = Target(member="worker1", address="127.0.0.1", port=door.port)
    silent = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(VISITORS_AT_ONCE)]
    for line in silent:
        line.sendall(b"t" * 15)
    try:
        assert probe("worker0", target, b"t" * 16, bandwidth=False).problem == ""
    finally:
        for line in silent:
            line.close()
        door.close()


def test_no_worker_0_is_a_cause_and_not_a_hang(listener: socket.socket) -> None:
    members = identities(2, port_of(listener))
    listener.close()
    (error,) = run([members[1]], listener, deadline_seconds=0.5).values()
    assert isinstance(error, SpecError)
    assert "nobody listened there within 0.5 s" in error.problem
