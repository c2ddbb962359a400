"""Links on a virtual clock: max-min fair, first in first out, exact in cases done by hand."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.predict.clock import Clock
from paceline.predict.links import WINDOW_BYTES, Links


def star(clock, hosts, rate=100.0, latency=0.0):
    links = Links(clock)
    for host in range(hosts):
        links.add(f"{host} out", rate, latency)
        links.add(f"{host} in", rate)
    return links


def send(links, clock, log, source, target, size, **limits):
    arrived = lambda: log.append((source, target, size, round(clock.now, 9)))  # noqa: E731
    links.send((source, target), (f"{source} out", f"{target} in"), size, arrived, **limits)


def run(messages, hosts=4, **kinds):
    clock, log = Clock(), []
    links = star(clock, hosts, **kinds)
    for source, target, size in messages:
        send(links, clock, log, source, target, size)
    clock.run()
    return log


def test_one_message_takes_its_bytes_over_the_rate_and_the_latency():
    assert run([(0, 1, 50)]) == [(0, 1, 50, 0.5)]
    assert run([(0, 1, 50)], latency=0.25) == [(0, 1, 50, 0.75)]


def test_messages_of_one_connection_follow_each_other_and_latency_is_paid_once_each():
    assert run([(0, 1, 50), (0, 1, 50)], latency=1.0) == [(0, 1, 50, 1.5), (0, 1, 50, 2.0)]


def test_two_into_one_halve_its_link_and_the_rest_goes_to_others():
    # 0 and 1 both send to 2: 50 each. 0 also sends to 3: its cable has 50 left.
    log = run([(0, 2, 100), (1, 2, 100), (0, 3, 100)])
    assert {moment for *_, moment in log} == {2.0}
    # Three into one leave 0's cable with two thirds for the fourth.
    log = run([(0, 3, 100), (1, 3, 100), (2, 3, 100), (0, 1, 200)])
    assert {(s, t): moment for s, t, _, moment in log}[0, 1] == 3.0


def test_what_ends_leaves_its_part_to_those_that_go_on():
    log = run([(0, 2, 50), (1, 2, 100)])
    assert log == [(0, 2, 50, 1.0), (1, 2, 100, 1.5)]


def test_a_connection_held_up_by_itself_leaves_the_link_to_others():
    clock, log = Clock(), []
    links = star(clock, 3)
    send(links, clock, log, 0, 2, 20, most_bytes_per_second=20.0)
    send(links, clock, log, 1, 2, 80)
    clock.run()
    assert log == [(0, 2, 20, 1.0), (1, 2, 80, 1.0)] or log == [(1, 2, 80, 1.0), (0, 2, 20, 1.0)]


def test_who_has_more_in_its_queue_gets_more_of_the_link_up_to_a_window():
    half = WINDOW_BYTES / 2
    log = run([(0, 2, half), *[(1, 2, half)] * 3], rate=WINDOW_BYTES)
    assert sorted((source, moment) for source, _, _, moment in log) == [
        (0, 1.5), (1, 0.75), (1, 1.5), (1, 2.0)
    ]  # fmt: skip
    log = run([(0, 2, 2 * half), (1, 2, 3 * half)], rate=WINDOW_BYTES)
    assert [moment for *_, moment in log] == [2.0, 2.5]  # a window each, however much is behind it


def test_departure_comes_before_arrival():
    clock, seen = Clock(), []
    links = star(clock, 2, latency=2.0)
    links.send(
        "c",
        ("0 out", "1 in"),
        100,
        lambda: seen.append(("arrived", clock.now)),
        lambda: seen.append(("departed", clock.now)),
    )
    clock.run()
    assert seen == [("departed", 1.0), ("arrived", 3.0)]


def test_a_clock_stops_where_it_is_told_to():
    clock, seen = Clock(), []
    for moment in (1, 2, 3):
        clock.after(moment, lambda moment=moment: seen.append(moment))
    assert clock.run(lambda: len(seen) == 2)
    assert (clock.now, seen) == (2, [1, 2])
    assert not clock.run(limit_seconds=2.5)
    cancelled = clock.after(0.1, lambda: seen.append("no"))
    cancelled.cancel()
    assert not clock.run()
    assert seen == [1, 2, 3]


flows = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 500)), min_size=1, max_size=25
)


@settings(max_examples=100, deadline=None)
@given(messages=flows)
def test_all_arrive_no_link_carries_more_than_it_can_and_none_idles_needlessly(messages):
    messages = [(s, t, size) for s, t, size in messages if s != t]
    log = run(messages, hosts=5)
    assert sorted((s, t, size) for s, t, size, _ in log) == sorted(messages)
    for side in (0, 1):
        for host in range(5):
            mine = [(m[2], m[3]) for m in log if m[side] == host]
            if mine:
                assert sum(size for size, _ in mine) <= 100 * max(at for _, at in mine) * (1 + 1e-6)
    # Some link of every connection is full for as long as it sends: the last to arrive had a
    # fullest link that carried no more than the bytes of all connections that share it.
    if log:
        s, t, _, last = log[-1]
        sharing = sum(size for a, b, size, _ in log if a == s or b == t)
        assert last * 100 <= sharing * (1 + 1e-6) + 1e-6


def test_the_same_run_twice():
    messages = [(i % 4, (i + 1 + i % 3) % 4, 10 * (i % 7) + 1) for i in range(60)]
    messages = [m for m in messages if m[0] != m[1]]
    assert run(messages) == run(messages)


@pytest.mark.parametrize("members", [2, 4])
def test_all_to_all_takes_the_closed_form(members):
    share = 100 / members
    messages = [(a, b, share) for a in range(members) for b in range(members) if a != b]
    log = run(messages, hosts=members)
    assert log[-1][3] == pytest.approx((members - 1) / members)


def test_what_the_kernel_holds_has_departed_though_it_has_not_left():
    clock, told = Clock(), []
    links = Links(clock, held_bytes=250.0)
    links.add("a out", 100.0)
    for name in "abc":
        departed = partial(lambda name: told.append((name, clock.now)), name)
        links.send("a to b", ("a out",), 100, lambda: None, departed)
    clock.run()
    assert told == [("a", 0.0), ("b", 0.0), ("c", pytest.approx(1.0))]
