"""How a worker leaves: when it has finished, when it fails, when the job is over before it is."""

import random
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import spec
from paceline.errors import ExchangeError
from paceline.protocol.actions import (
    Departed,
    Dismissed,
    Exit,
    Lost,
    Ready,
    Send,
)
from paceline.protocol.chunks import ParameterSize
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.membership import CrewBook
from paceline.protocol.messages import (
    Admitted,
    Answer,
    Commit,
    Copy,
    Gone,
    Join,
    Leave,
    Newcomer,
    Push,
    Sealed,
    Settled,
    Stop,
)
from paceline.protocol.plan import Shape, make_plan
from paceline.protocol.seat import SeatMachine
from tests.protocol.network import Network, make
from tests.protocol.test_membership import MODES


def live_with_a_guest_that_fails(seed, mode, *, joins_after, fails_after, script):
    """The network at its end, and what ended it; None where the others have finished."""
    rng = random.Random(seed)
    workers, servers, chunks = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 5)
    plan = make(workers, servers, chunks, stops=True, **mode)
    network = Network(rng, plan, rng.randint(2, 9), **script)
    guest, moments = workers, (joins_after, fails_after)
    try:
        for events, happens in zip(moments, (network.join, network.fail), strict=True):
            for _ in range(events):
                network.happen()
            if happens == network.join or f"worker{guest}" in network.trainers:
                happens(guest)
        return network.run(), None
    except ExchangeError as error:
        return network, str(error)


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    mode=st.sampled_from(MODES),
    joins_after=st.integers(0, 60),
    fails_after=st.integers(0, 80),
    script=st.fixed_dictionaries({name: st.booleans() for name in ("twice", "touches", "shared")}),
)
def test_a_guest_that_fails_ends_the_job_with_a_sentence_or_is_done_without(
    seed, mode, joins_after, fails_after, script
):
    script["touches"] &= mode["mode"] == "sync"
    moments = {"joins_after": joins_after, "fails_after": fails_after}
    network, why = live_with_a_guest_that_fails(seed, mode, **moments, script=script)
    if why is None:
        network.check_ended()
    else:
        assert re.search(r"failed in step \d+, a part of which was done", why), why


def test_a_guest_that_fails_mostly_leaves_the_others_alone():
    script = {"twice": False, "touches": False, "shared": False}
    whys = [
        live_with_a_guest_that_fails(
            seed, {"mode": "sync"}, joins_after=9, fails_after=40, script=script
        )[1]
        for seed in range(200)
    ]
    assert whys.count(None) > 150


@pytest.mark.parametrize(
    ("mode", "servers", "goes_on", "leaves"),
    [
        ("sync", 2, False, True),
        ("sync", 2, True, False),
        ("async", 2, False, False),
        ("quorum", 2, False, False),
        ("async", 0, False, True),  # its seat serves on until the others have finished
    ],
)
def test_a_worker_that_failed_leaves_only_where_the_others_cannot_go_on(
    mode, servers, goes_on, leaves
):
    sizes = [ParameterSize(name=f"p{i}", elements=16) for i in range(4)]
    shape = Shape(workers=2, servers=servers, goes_on=goes_on)
    plan = make_plan(sizes, spec.Server(mode=mode, chunk="64B"), shape)
    machine = ExchangeMachine(plan, 0)
    told = machine.handle(Exit(failed=True))
    assert machine.has_left
    assert machine.abandons == goes_on
    members = [seat.member for seat in plan.seats]
    assert told == [Send(member, Leave(0, 0), seat=True) for member in members if leaves]


def test_what_was_made_leaves_before_the_worker_does():
    machine = ExchangeMachine(make(2, 1, 6, mode="async", window=2), 0)
    sent = [action for chunk in range(6) for action in machine.handle(Ready(chunk))]
    assert machine.handle(Exit()) == []
    for number in range(6):
        assert not any(isinstance(action.message, Leave) for action in sent)
        sent += machine.handle(Departed(sent[number].message.chunk))
    assert sent[-1] == Send("server0", Leave(0, 1), seat=True)


def who_may_not_be_lost(**options):
    """A worker whose loss would end the job: so it says that it leaves when it fails."""
    plan = make(2, 1, 6, window=2)
    rules = msgspec.structs.replace(plan.rules, least_workers=None)
    return ExchangeMachine(msgspec.structs.replace(plan, rules=rules), 0)


def test_what_one_who_fails_has_made_goes_before_it():
    hurried = who_may_not_be_lost()
    sent = [action for chunk in range(6) for action in hurried.handle(Ready(chunk))]
    *rest, last = hurried.handle(Exit(failed=True))
    assert sorted(send.message.chunk for send in (*sent, *rest)) == [*range(6)]
    assert last == Send("server0", Leave(0, 1), seat=True)


def test_who_fails_inside_a_step_leaves_without_the_rest_of_it():
    hurried = who_may_not_be_lost()
    for chunk in range(5):
        hurried.handle(Ready(chunk))
    assert hurried.handle(Exit(failed=True)) == [Send("server0", Leave(0, 0), seat=True)]


def test_who_fails_before_it_commits_a_step_leaves_without_that_step():
    hurried = who_may_not_be_lost()
    for chunk in range(6):
        hurried.handle(Ready(chunk, hold=True))
    *_, last = hurried.handle(Exit(failed=True))
    assert last == Send("server0", Leave(0, 0), seat=True)


def with_a_guest():
    """A seat of two chunks, worker 0, and worker 1 that has joined."""
    seat = SeatMachine(make(1, 1, 2, stops=True), 0)
    seat.handle(Join(1))
    seat.handle(Settled(1, 1))
    return seat


def held(worker, chunk):
    return Push(worker, chunk, 0, 0, hold=True, generation=worker)


def test_a_guest_that_fails_before_it_commits_counts_in_the_step_that_it_made():
    guest = ExchangeMachine(make(1, 1, 2, stops=True), 1, generation=1)
    seat, leave = with_a_guest(), Leave(1, 1, 1)
    made = [action for chunk in range(2) for action in guest.handle(Ready(chunk, hold=True))]
    assert [*made, *guest.handle(Exit(failed=True))][-1].message == leave
    for worker in (0, 1):
        seat.handle(held(worker, 0))
    seat.done(seat.take(), (4.0,))
    seat.handle(held(1, 1))
    seat.handle(leave)
    seat.handle(held(0, 1))
    seat.done(seat.take(), (4.0,))
    assert seat.missing(0) == seat.missing(1) == [0]
    seat.handle(Commit(0, 0, 0.5))
    works = [seat.take(), seat.take()]
    assert [(work.kind, work.scale) for work in works] == [("apply", 0.5)] * 2
    assert [work.parts for work in works] == [((0, 0, 0.5), (1, 0, 0.5))] * 2


def test_a_guest_that_fails_inside_a_step_a_part_of_which_is_measured_ends_the_job():
    seat = with_a_guest()
    for worker in (0, 1):
        seat.handle(held(worker, 0))
    with pytest.raises(ExchangeError, match="failed in step 0, a part of which was done"):
        seat.handle(Leave(1, 0, 1))


def test_one_who_is_gone_before_its_first_step_takes_part_in_none():
    machine, book = ExchangeMachine(make(2, 1, 1, mode="async"), 0), CrewBook((0, 1))
    for news in (Newcomer(2, 100), Gone(2)):
        for change in machine.handle(news):
            book.hear(change)
    for step in (4, 100, 101):
        list(book.begin(step))
        assert book.crew == {0, 1}


def test_a_seat_that_serves_nothing_tells_nobody_of_what_a_newcomer_brought():
    sizes = [ParameterSize(name="p", elements=16)]
    plan = make_plan(sizes, spec.Server(mode="async"), Shape(workers=2, servers=2))
    told = {}
    for number, seat in enumerate(SeatMachine(plan, s) for s in (0, 1)):
        seat.handle(Admitted(worker=2, generation=1, step=3, crew=(0, 1, 2)))
        if plan.chunks_of(number):
            seat.handle(Push(2, 0, 3, 3, generation=1))
        told[number] = [a.message for a in seat.handle(Lost("worker2")) if isinstance(a, Send)]
    assert sorted(told.values(), key=len) == [[], [Gone(2), Gone(2)]]


def test_the_scale_is_that_of_who_has_said_it():
    seat = SeatMachine(make(2, 1, 1, whole=True), 0)
    seat.handle(Admitted(worker=2, generation=1, step=0, crew=(0, 1, 2)))
    for worker, generation in ((0, 0), (1, 0), (2, 1)):
        seat.handle(Push(worker, 0, 0, 0, hold=True, generation=generation))
    seat.done(seat.take(), [4.0])
    seat.handle(Commit(2, 0, 0.5, 0, 1))
    for founder in ("worker0", "worker1"):
        seat.handle(Lost(founder))
    work = seat.take()
    assert (work.kind, work.scale) == ("apply", 0.5)


def test_one_who_was_sent_away_is_told_so_once():
    seat = SeatMachine(make(1, 1, 1), 0)
    seat.handle(Admitted(worker=1, generation=1, step=0, crew=(0, 1)))
    for worker, generation in ((0, 0), (1, 1)):
        seat.handle(Push(worker, 0, 0, 0, generation=generation))
    seat.done(seat.take())
    seat.handle(Leave(0, 1))
    late = Push(1, 0, 1, 1, generation=1)
    assert [a.message for a in seat.handle(late)] == [
        Stop("the others have finished after 1 steps, and so has worker1.", over=1)
    ]
    assert seat.handle(late) == []


def sent(actions, kind):
    return [a.to for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def test_one_who_was_sent_away_keeps_nothing_for_the_others():
    seat = SeatMachine(make(1, 2, 2, whole=True), 1)
    for worker in (1, 2):
        seat.handle(Admitted(worker=worker, generation=worker, step=0, crew=(0, 1, 2)))
    for worker in range(3):
        seat.handle(Push(worker, 1, 0, 0, generation=worker))
    for told in (Sealed(0, 0), Leave(0, 1, 0, 1)):
        seat.handle(told)
    assert sent(seat.done(seat.take()), Copy) == ["worker1"]
    turned_away = seat.handle(Push(1, 1, 1, 1, generation=1))
    assert sent(turned_away, Stop) == ["worker1"]
    assert sent(turned_away, Copy) == ["worker2"]


def test_one_who_has_left_and_is_gone_keeps_nothing_for_the_others():
    seat = SeatMachine(make(2, 2, 2, whole=True), 0)
    for worker in range(2):
        seat.handle(Push(worker, 0, 0, 0))
    for told in (Sealed(1, 0), Leave(0, 1, 0, 1)):
        seat.handle(told)
    assert sent(seat.done(seat.take()), Copy) == ["worker0"]
    gone = seat.handle(Lost("worker0"))
    assert sent(gone, Copy) == sent(gone, Answer) == ["worker1"]


def test_one_who_was_sent_away_does_not_miss_the_servers():
    machine = ExchangeMachine(make(1, 1, 1), 1, step=3, generation=1)
    sent, dismissed = machine.handle(Stop("the others have finished.", over=4))
    assert (sent.message, dismissed) == (Leave(1, 4, 1), Dismissed("the others have finished."))
    assert machine.handle(Lost("server0")) == []
