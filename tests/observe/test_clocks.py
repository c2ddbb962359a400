"""Clocks of hosts, from the ends of their collectives; and waiting, told by them."""

import random

import pytest

from paceline.observe.clocks import align
from paceline.observe.waiting import tell_waiting
from paceline.record import CollectiveCall, Step


def collectives(arrivals, *, shift=0.0, transfer=0.01, jitter=0.0, seed=0, last=None):
    """A member's all-reduces: called at `arrivals`, ended `transfer` after the last had come."""
    chance = random.Random(seed)
    return [
        CollectiveCall(
            number=number,
            group="0",
            name="all_reduce",
            arrived_seconds=own - shift,
            blocked_seconds=own - shift,
            ended_seconds=(last or arrivals)[number] + transfer + chance.uniform(0, jitter) - shift,
        )
        for number, own in enumerate(arrivals)
    ]


def two_hosts(shift, *, jitter=0.002, late=0.05):
    first = [float(step) for step in range(40)]
    second = [moment + late for moment in first]
    return {
        "rank0": collectives(first, last=second, jitter=jitter, seed=1),
        "rank1": collectives(second, shift=shift, last=second, jitter=jitter, seed=2),
    }


@pytest.mark.parametrize("shift", [0.0, 123.456, -9_000.0])
def test_an_offset_is_found_within_its_error(shift):
    found = align(two_hosts(shift), {"rank0": "a", "rank1": "b"})
    assert found["rank0"].seconds == 0
    assert found["rank1"].seconds == pytest.approx(shift, abs=0.002)
    assert abs(found["rank1"].seconds - shift) <= found["rank1"].error_seconds <= 0.003
    assert found["rank1"].collectives == 40


def test_members_of_one_host_share_a_clock():
    found = align(two_hosts(5.0), {"rank0": "a", "rank1": "a"})
    assert found["rank1"] == (0.0, 0.0, 0)


def test_a_host_is_placed_by_way_of_another():
    members = two_hosts(7.0)
    chain = [
        CollectiveCall(
            number=n, group="1", name="all_reduce", arrived_seconds=n + s, ended_seconds=n + s + 0.1
        )
        for n in range(9)
        for s in (0.0,)
    ]
    moved = [
        CollectiveCall(
            number=one.number,
            group="1",
            name="all_reduce",
            arrived_seconds=one.arrived_seconds - 3.0,
            ended_seconds=(one.ended_seconds or 0) - 3.0,
        )
        for one in chain
    ]
    members["rank1"] += chain
    members["rank2"] = moved
    found = align(members, {"rank0": "a", "rank1": "b", "rank2": "c"})
    assert found["rank2"].seconds == pytest.approx(10.0, abs=0.003)


def test_a_host_without_common_ends_is_not_placed():
    members = {**two_hosts(0.0), "rank2": []}
    assert "rank2" not in align(members, {"rank0": "a", "rank1": "b", "rank2": "c"})


def test_broadcasts_tell_no_clock():
    members = two_hosts(0.0)
    for entries in members.values():
        for entry in entries:
            entry.name = "broadcast"
    assert "rank1" not in align(members, {"rank0": "a", "rank1": "b"})


def steps(count, shift=0.0, **breakdown):
    return [
        Step(
            step=number,
            start_seconds=number - 0.1 - shift,
            end_seconds=number + 0.2 - shift,
            breakdown_seconds=dict(breakdown),
            samples=8,
        )
        for number in range(count)
    ]


def test_waiting_is_told_from_transfer_across_clocks():
    shift = 77.0
    calls = two_hosts(shift, jitter=0.0)
    given = {
        "rank0": steps(40, forward=0.1, exchange_exposed=0.06),
        "rank1": steps(40, shift, forward=0.15, exchange_exposed=0.01),
    }
    told = tell_waiting(given, calls, {"rank0": 0.0, "rank1": shift})
    first, second = told["rank0"][7], told["rank1"][7]
    assert first.breakdown_seconds["wait"] == pytest.approx(0.05)
    assert first.breakdown_seconds["exchange_exposed"] == pytest.approx(0.01)
    assert second.breakdown_seconds["wait"] == pytest.approx(0.0, abs=1e-9)
    late = second.ready_seconds + shift - first.ready_seconds
    assert late == pytest.approx(0.05)
    assert tell_waiting(told, calls, {"rank0": 0.0, "rank1": shift}) == told


def test_lateness_in_one_collective_after_another_adds_up():
    early, late = [], []
    for step in range(5):
        for part in range(3):
            at = step + 0.04 * part
            early.append(at)
            late.append(at + 0.01)
    calls = {
        "rank0": collectives(early, last=late, transfer=0.001),
        "rank1": collectives(late, last=late, transfer=0.001),
    }
    given = {
        "rank0": steps(5, forward=0.1, exchange_exposed=0.033),
        "rank1": steps(5, forward=0.13, exchange_exposed=0.003),
    }
    told = tell_waiting(given, calls, {"rank0": 0.0, "rank1": 0.0})
    assert told["rank0"][3].breakdown_seconds["wait"] == pytest.approx(0.03)
    apart = told["rank1"][3].ready_seconds - told["rank0"][3].ready_seconds
    assert apart == pytest.approx(0.03)
