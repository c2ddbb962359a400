"""When a step closes, by whose word, and who is told: one seat and a few messages."""

import pytest

from paceline.errors import ExchangeError
from paceline.protocol.actions import Lost
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.messages import (
    Admitted,
    Chosen,
    Commit,
    Configure,
    Declare,
    Join,
    Push,
    Settled,
)
from paceline.protocol.seat import SeatMachine
from tests.protocol.network import make


def quorum(workers, servers=1):
    """The arbiter of a job in which two workers make a step."""
    return SeatMachine(make(workers, servers, 2 * servers, mode="quorum", quorum=2), 0)


def messages(actions):
    return [action.message for action in actions]


def test_founders_that_clip_by_different_factors_are_told():
    seat = SeatMachine(make(2, 1, 1), 0)
    for worker in (0, 1):
        seat.handle(Push(worker, 0, 0, 0, hold=True))
    seat.done(seat.take(), [4.0])
    seat.handle(Commit(0, 0, 0.5))
    with pytest.raises(ExchangeError, match=r"gradient of step 0 by different factors, 0\.5, 1:"):
        seat.handle(Commit(1, 0, 1.0))


def test_one_who_is_lost_after_it_has_made_a_step_is_not_chosen_for_it():
    seat = quorum(3)
    assert seat.handle(Declare(0, 0)) == []
    seat.handle(Lost("worker0"))
    assert seat.handle(Declare(1, 0)) == [], "one of two"
    assert messages(seat.handle(Declare(2, 0))) == [Chosen(0, (1, 2))] * 2


def test_a_newcomer_tells_the_last_choice_when_all_who_heard_of_it_are_lost():
    seat = quorum(2, servers=2)
    chosen = Chosen(0, (0, 1))
    seat.handle(Declare(0, 0))
    assert messages(seat.handle(Declare(1, 0))) == [chosen] * 2
    for worker in ("worker0", "worker1"):
        seat.handle(Lost(worker))
    admitted, told = messages(seat.handle(Join(2)))
    assert (type(admitted), told) == (Admitted, chosen)
    newcomer = ExchangeMachine(make(2, 2, 4, mode="quorum"), 2)
    newcomer.handle(admitted)
    assert [(send.to, send.message) for send in newcomer.handle(told)] == [("server1", chosen)]


def test_a_step_that_is_held_back_for_a_newcomer_waits_for_nobody_else():
    seat = SeatMachine(make(2, 2, 4), 0)
    seat.handle(Join(2))
    chunk, *_ = seat._plan.chunks_of(0)
    for step in (0, 1):
        for worker in (0, 1):
            seat.handle(Push(worker, chunk, step, step))
    assert seat.missing(chunk) == [2]
    assert [seat.take().step, seat.take()] == [0, None]
    seat.handle(Settled(2, 1))
    assert seat.take().step == 1


def test_where_workers_differ_a_step_goes_by_the_settings_of_one_who_brings_a_gradient():
    seat = SeatMachine(make(2, 1, 1, mode="quorum", quorum=2), 0)
    for worker, rate in ((0, 0.1), (1, 0.2)):
        seat.handle(Configure(worker, 1, [{"lr": rate}]))
        seat.handle(Push(worker, 0, 0, 0, empty=not worker, settings=1))
    seat.handle(Chosen(0, (0, 1)))
    work = seat.take()
    assert (work.parts, work.settings) == (((1, 0, 0.5),), [{"lr": 0.2}])
