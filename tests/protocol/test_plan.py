"""One plan for runtime, predictor and tests: who serves, by which rules, and what is refused."""

import pytest

from paceline import spec
from paceline.errors import SpecError
from paceline.protocol.chunks import ParameterSize
from paceline.protocol.homes import Homes
from paceline.protocol.plan import (
    ACCELERATED_CHUNK_BYTES,
    LOOPBACK_CHUNK_BYTES,
    SHARED_CHUNK_BYTES,
    TRAVELLING_CHUNK_BYTES,
    Shape,
    make_plan,
    suitable_bytes,
    written_shape,
)

SIZES = [ParameterSize(name=f"w{i}", elements=1 << 18) for i in range(8)]
APART = Shape(workers=3, servers=2)


def on_one_host(workers, servers=0):
    return Shape(workers=workers, servers=servers, hosts=(0,) * (workers + servers))


def plan(shape=APART, **options):
    return make_plan(SIZES, spec.Server(**options), shape)


def test_rules_follow_mode_and_place():
    rules = plan().rules
    assert (rules.exclusive, rules.shared, rules.window, rules.staleness) == (True, False, 2, 0)
    bounded = plan(mode="bounded", staleness=2).rules
    assert (bounded.exclusive, bounded.staleness, bounded.copies) == (False, 2, False)
    assert plan(on_one_host(3, 2), mode="bounded", staleness=2).rules.copies
    assert plan(mode="bounded", staleness=0).rules.exclusive
    assert plan(mode="quorum").rules.quorum == 2, "all but one"
    assert plan().rules.quorum == 0, "only in quorum"
    assert plan(on_one_host(3, 2)).rules.window is None, "nothing departs in shared memory"
    assert not plan(update="worker").rules.updates
    second_homes = [
        plan(Shape(workers=3, servers=2, goes_on=True, accelerated=on_gpus)).rules.second_homes
        for on_gpus in (False, True)
    ]
    assert second_homes == [True, False]


def test_without_servers_the_workers_serve():
    seats = plan(Shape(workers=2)).seats
    assert [seat.member for seat in seats] == ["worker0", "worker1"]
    assert plan(Shape(workers=2)).seat_of("worker1") == 1
    assert plan().seat_of("worker1") is None


def test_chunks_suit_the_way_they_go():
    asked = spec.Server()
    assert suitable_bytes(asked, APART) == TRAVELLING_CHUNK_BYTES
    assert suitable_bytes(asked, on_one_host(3, 2)) == SHARED_CHUNK_BYTES
    on_gpus = Shape(workers=3, servers=2, hosts=(0,) * 5, accelerated=True)
    assert suitable_bytes(asked, on_gpus) == ACCELERATED_CHUNK_BYTES
    loopback = spec.Server(transport="tcp")
    assert suitable_bytes(loopback, on_one_host(3, 2)) == LOOPBACK_CHUNK_BYTES
    assert suitable_bytes(spec.Server(chunk="1MiB"), APART) == (1 << 20, 1 << 20)


def test_the_arbiter_serves_a_chunk_however_small_the_model():
    tiny = [ParameterSize(name="w", elements=1)]
    made = make_plan(tiny, spec.Server(placement="optimal"), Shape(workers=4, servers=1))
    assert made.chunks_of(Homes(made).arbiter) == [0]


@pytest.mark.parametrize(
    ("engine", "written", "hosts"),
    [
        ("here", [], (0, 0, 0, 0)),
        ("tunnel", [], (0, 1, 2, 3)),
        ("tunnel", [{"workers": 3, "servers": 1}], (0, 0, 0, 0)),
        ("predict", [{"workers": 2, "servers": 1}, {"workers": 1}], (0, 0, 1, 0)),
    ],
)
def test_members_share_hosts_as_it_is_written(engine, written, hosts):
    cluster = {"workers": 3, "hosts": written}
    asked = {"engine": engine, "architecture": "server", "cluster": cluster}
    shape = written_shape(spec.from_tables(asked, "e.toml"))
    assert shape == Shape(workers=3, servers=1, hosts=hosts)
    assert shape.on_one_host == (len(set(hosts)) == 1)


@pytest.mark.parametrize(
    ("options", "shape", "told"),
    [
        ({"placement": "optimal"}, Shape(workers=2), "no servers to share with"),
        ({"mode": "quorum", "quorum": 4}, APART, "quorum = 4 of 3 workers"),
        ({"mode": "async", "update": "worker"}, APART, "weights would drift apart"),
        ({"compression": "fp16"}, on_one_host(2), "do not leave this host"),
        ({"transport": "shm"}, APART, "on several hosts"),
        (
            {"placement": "colocated"},
            Shape(workers=2, goes_on=True, accelerated=True),
            "takes weights with it: workers compute on GPUs",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(options, shape, told):
    with pytest.raises(SpecError, match=told):
        plan(shape, **options)


@pytest.mark.parametrize(
    ("text", "servers", "waits", "exclusive"),
    [
        ("single", False, True, True),
        ("ring", False, True, True),
        ("average", False, True, False),
        ("hybrid", False, True, True),
        ("hybrid:between=server", True, True, True),
        ("server", True, True, True),
        ("server:placement=colocated", False, True, True),
        ("server:mode=bounded", True, True, False),
        ("server:mode=bounded,staleness=0", True, True, True),
        ("server:mode=quorum", True, False, False),
        ("server:mode=async", True, False, False),
    ],
)
def test_an_architecture_says_what_it_is(text, servers, waits, exclusive):
    options = spec.parse_architecture(text)
    assert (options.takes_servers, options.waits_for_all, options.exclusive) == (
        servers,
        waits,
        exclusive,
    )
