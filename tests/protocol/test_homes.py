"""Second homes: what a lost server had is with others, and they go on from there."""

import random

import pytest

from paceline.errors import ExchangeError
from paceline.protocol.actions import (
    Adopt,
    Departed,
    Enter,
    FetchStates,
    KeepCopy,
    KeepState,
    Lost,
    Ready,
    Rehomed,
    Send,
    Usable,
)
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.messages import (
    Admitted,
    Answer,
    Assign,
    Copied,
    Copy,
    FetchState,
    Gathered,
    Handed,
    Holding,
    Join,
    Newcomer,
    Orphans,
    Pull,
    Push,
    Rescue,
    Sealed,
    State,
    Stop,
)
from paceline.protocol.plan import Shape, deal_without, why_no_second_homes
from paceline.protocol.seat import SeatMachine
from paceline.spec import Server
from tests.protocol.network import Network, make


def job(workers=2, servers=2, chunks=4, **more):
    plan = make(workers, servers, chunks, whole=True, **more)
    assert plan.rules.second_homes
    return plan


def machine_at(plan, step, worker=0):
    """A worker that has pushed all chunks of a step, and was answered all of those before."""
    machine = ExchangeMachine(plan, worker)
    for number in range(step + 1):
        for chunk in range(len(plan.owners)):
            machine.handle(Ready(chunk))
            machine.handle(Departed(chunk))
        for chunk in range(len(plan.owners)) if number < step else ():
            machine.handle(Answer(chunk, number + 1, step=number))
    return machine


def test_only_the_lost_servers_chunks_are_dealt_anew():
    plan = job(2, 3, 9)
    owners = deal_without(plan, {1})
    assert 1 not in owners
    kept = [(a, b) for a, b in zip(plan.owners, owners, strict=True) if a != 1]
    assert all(a == b for a, b in kept), "what the others hold stays where it is"


def test_nobody_is_answered_before_one_worker_has_state_and_weights():
    plan = job()
    seat = SeatMachine(plan, 0)
    chunk, other = plan.chunks_of(0)
    for worker in (0, 1):
        for one in (chunk, other):
            seat.handle(Push(worker, one, 0, 0))
    assert seat.handle(Sealed(0, 0)) == []
    copy, answer = seat.done(seat.take())
    keeper = int(copy.to[6:])
    assert copy.message == Copy(chunk, 1)
    assert answer == Send(f"worker{keeper}", Answer(chunk, 1, step=0), chunk)
    other = 1 - keeper
    assert seat.handle(Pull(other, chunk, 1)) == []
    late, pulled = seat.handle(Copied(keeper, chunk, 1))
    assert late == Send(f"worker{other}", Answer(chunk, 1, step=0), chunk)
    assert pulled == Send(f"worker{other}", Answer(chunk, 1), chunk)


def test_a_worker_says_when_it_has_both_whichever_came_first():
    plan = job()
    machine = machine_at(plan, 0)
    owner = f"server{plan.owners[0]}"
    copied = Send(owner, Copied(0, 0, 1), seat=True)
    assert machine.handle(Copy(0, 1)) == [KeepCopy(Copy(0, 1))], "weights are on their way"
    assert machine.handle(Answer(0, 1, step=0)) == [Usable(0, 1), copied]
    machine.handle(Answer(1, 1, step=0))
    assert machine.handle(Copy(1, 1))[-1].message == Copied(0, 1, 1)


def test_a_worker_tells_what_it_has_and_sends_again_what_was_not_answered():
    plan = job(chunks=6)
    machine = machine_at(plan, 1)
    lost = plan.chunks_of(1)
    machine.handle(Copy(lost[0], 2))
    machine.handle(Answer(lost[0], 2, step=1))
    rehomed, told, *again = machine.handle(Lost("server1"))
    assert rehomed == Rehomed("server1", 2, (0,) * 6)
    assert told.to == "server0"
    holdings = [Holding(lost[0], 2, True, False, -1)]
    holdings += [Holding(chunk, 1, False, False, 1) for chunk in lost[1:]]
    assert told.message == Orphans(0, (1,), tuple(holdings), sealed=2)
    assert [send.message.chunk for send in again] == lost[1:]
    assert machine.handle(Rescue(lost[0], 2)) == [
        Send("server0", Handed(0, lost[0], 2), lost[0], seat=True)
    ]
    assert machine.handle(Rescue(lost[0], 1)) == [], "of another version than it has"


def test_a_new_home_asks_who_has_the_newest_and_goes_on_from_there():
    plan = job()
    seat = SeatMachine(plan, 0)
    first, second = plan.chunks_of(1)
    newest = Holding(first, 3, True, False, -1), Holding(second, 2, False, False, 2)
    older = Holding(first, 2, False, False, 2), Holding(second, 2, True, False, 2)
    assert seat.handle(Orphans(0, (1,), newest)) == []
    kept = seat.handle(Push(1, first, 2, 2))
    assert [type(action).__name__ for action in kept] == ["Keep"], "it waits for its chunk"
    asked = seat.handle(Orphans(1, (1,), older))
    assert asked == [Send("worker0", Rescue(first, 3)), Send("worker1", Rescue(second, 2))]
    assert seat.missing(first) == []
    *_, told = seat.handle(Handed(0, first, 3, absent=(first,)))
    answer = Answer(first, 3, absent=(first,), step=2)
    assert told == Send("worker1", answer, first), "it was updated already"
    seat.handle(Handed(1, second, 2))
    for worker in (0, 1):
        seat.handle(Push(worker, second, 2, 2))
    assert seat.missing(second) == [0, 1], "of the chunks that it had before"
    assert seat.handle(Handed(1, second, 2)) == [], "came before"


def test_state_that_was_asked_of_a_lost_server_is_asked_of_the_next_who_answers_when_it_has_it():
    plan = job()
    machine, seat = machine_at(plan, 1), SeatMachine(plan, 0)
    machine.handle(FetchStates())
    first, second = plan.chunks_of(1)
    assert machine.handle(State(first)) == [KeepState(State(first))]
    sent = machine.handle(Lost("server1"))
    again = [send for send in sent if isinstance(getattr(send, "message", None), FetchState)]
    assert again == [Send("server0", FetchState(0, second), seat=True)]
    told = Holding(first, 1, True, False, 1), Holding(second, 1, True, False, 1)
    seat.handle(Orphans(0, (1,), told))
    assert seat.handle(again[0].message) == [], "it is on its way here"
    seat.handle(Orphans(1, (1,), told))
    adopt, *others = seat.handle(Handed(0, second, 1))
    assert adopt == Adopt(Handed(0, second, 1))
    assert Send("worker0", State(second), second) in others
    assert seat.handle(FetchState(1, second)) == [Send("worker1", State(second), second)]


def test_what_is_set_anew_does_not_meet_what_a_lost_server_had():
    plan = job()
    seat = SeatMachine(plan, 0)
    with pytest.raises(ExchangeError, match="lost while weights or state were set anew"):
        seat.handle(Assign(0, plan.chunks_of(1)[0]))


def test_what_was_gathered_before_a_loss_seals_nothing_behind_it():
    machine = machine_at(job(chunks=4), 0)
    assert machine.handle(Gathered(0, 0, (0, 1))) == []
    sent = machine.handle(Lost("server1"))
    assert not [send for send in sent if isinstance(getattr(send, "message", None), Sealed)]
    sealed = machine.handle(Gathered(0, 0, (0, 1), 1))
    assert [send.message for send in sealed] == [Sealed(0, 0)]


def test_state_that_nobody_else_has_stops_the_job():
    plan = job()
    seat = SeatMachine(plan, 0)
    told = tuple(Holding(chunk, 0, False, False, 0) for chunk in plan.chunks_of(1))
    seat.handle(Orphans(0, (1,), told))
    with pytest.raises(
        ExchangeError, match=r"server1 was lost, and nobody else had the opt.*state"
    ):
        seat.handle(Orphans(1, (1,), told))


def test_means_have_no_state():
    plan = job()
    machine = machine_at(plan, 0)
    for chunk in range(4):
        machine.handle(Answer(chunk, 1, step=0))
    for chunk in range(4):
        machine.handle(Ready(chunk, mean=True))
        machine.handle(Answer(chunk, 2, step=1, absent=(chunk,)))
    lost = plan.chunks_of(1)[0]
    assert machine._homes.holding(lost, 2, -1) == Holding(lost, 2, False, True, -1)
    assert machine._homes.handed(0, lost, 2) == Handed(0, lost, 2, (lost,), True)


def test_a_worker_lost_before_all_is_at_home_stops_the_job():
    plan = job(3)
    seat = SeatMachine(plan, 0)
    told = tuple(Holding(chunk, 1, True, False, 1) for chunk in plan.chunks_of(1))
    seat.handle(Orphans(0, (1,), told))
    with pytest.raises(ExchangeError, match="worker2 was lost before all that server1 had"):
        seat.handle(Lost("worker2"))


def test_another_second_home_is_found_for_what_a_lost_worker_kept():
    plan = job(3)
    seat = SeatMachine(plan, 0)
    for worker in range(3):
        for chunk in plan.chunks_of(0):
            seat.handle(Push(worker, chunk, 0, 0))
    seat.handle(Sealed(0, 0))
    copy, *_ = seat.done(seat.take())
    keeper = int(copy.to[6:])
    again = [send for send in seat.handle(Lost(f"worker{keeper}")) if send.message == copy.message]
    assert [send.to for send in again] != []
    assert again[0].to != copy.to


def test_who_asks_to_join_without_a_server_is_told_so():
    seat = SeatMachine(job(chunks=4), 0)
    seat.handle(Orphans(0, (1,), ()))
    (told,) = seat.handle(Join(2))
    assert told.to == "worker2"
    assert isinstance(told.message, Stop)


def test_one_whom_the_lost_server_alone_had_admitted_stops_the_job():
    """Some workers were told to share the batch with it, others were not."""
    machine = machine_at(job(), 0)
    machine.handle(Newcomer(2, 8))
    (told,) = [a for a in machine.handle(Lost("server0")) if isinstance(a, Send) and a.seat][:1]
    assert told.message.joined == (2,)
    with pytest.raises(ExchangeError, match="server0 was lost while worker2 came or went"):
        SeatMachine(job(), 1).handle(told.message)


def test_a_worker_is_not_admitted_after_the_loss_of_a_server_that_it_saw():
    machine = ExchangeMachine(job(), 2)
    machine.handle(Enter())
    machine.handle(Lost("server1"))
    with pytest.raises(ExchangeError, match="server1 was lost while worker2 joined"):
        machine.handle(Admitted(2, 1, 8, (0, 1, 2)))


def test_two_orders_of_losses_stop_the_job():
    seat = SeatMachine(job(2, 4, 8), 0)
    seat.handle(Orphans(0, (1,), ()))
    with pytest.raises(ExchangeError, match="two servers were lost at once"):
        seat.handle(Orphans(1, (2,), ()))


def test_the_last_server_cannot_be_done_without():
    machine = machine_at(job(), 0)
    machine.handle(Lost("server0"))
    with pytest.raises(ExchangeError, match="no server is left"):
        machine.handle(Lost("server1"))


@pytest.mark.parametrize(
    ("options", "shape", "reason"),
    [
        ({}, Shape(workers=2, servers=2), ""),
        ({}, Shape(workers=2, servers=1), "no other server"),
        ({}, Shape(workers=2, servers=2, hosts=(0, 0, 0, 0)), "transport=tcp"),
        ({"transport": "tcp"}, Shape(workers=2, servers=2, hosts=(0, 0, 0, 0)), ""),
        ({"mode": "bounded"}, Shape(workers=2, servers=2), "mode=bounded"),
        ({"placement": "colocated"}, Shape(workers=2), ""),
        ({"placement": "colocated"}, Shape(workers=2, hosts=(0, 0)), "transport=tcp"),
        ({"placement": "colocated"}, Shape(workers=2, hosts=(0, 0), goes_on=True), ""),
        ({"placement": "colocated", "mode": "async"}, Shape(workers=2), "mode=async"),
        ({"placement": "colocated", "compression": "fp16"}, Shape(workers=2), "compression=fp16"),
        ({"placement": "optimal"}, Shape(workers=3, servers=1), ""),
        ({}, Shape(workers=2, servers=2, accelerated=True), "workers compute on GPUs"),
    ],
)
def test_where_there_are_second_homes(options, shape, reason):
    found = why_no_second_homes(Server(**options), shape)
    assert reason in found
    assert bool(found) == bool(reason)


class AsksOnce(ExchangeMachine):
    """For state that went with a server it does not ask another."""

    def _lose_seat(self, member):
        self._fetching = set()
        return super()._lose_seat(member)


def test_a_worker_that_does_not_ask_again_is_caught():
    with pytest.raises(AssertionError, match="someone waits for ever"):
        lose_a_server({"fetches": True}, machines=(AsksOnce, SeatMachine))


SCRIPTS = ["touches", "mean", "schedule", "fetches"]


@pytest.mark.parametrize(
    "script", [{}, {"mean": True, "skips": True}, *({name: True} for name in SCRIPTS)]
)
def test_a_job_goes_on_wherever_a_server_is_lost(script):
    lose_a_server(script)


def lose_a_server(script, machines=(ExchangeMachine, SeatMachine)):
    for seed in range(60):
        rng = random.Random(seed)
        plan = job(3, 3, 5, window=rng.choice([1, 2, 100]))
        network = Network(rng, plan, 5, machines=machines, **script)
        while not all(
            network.weights.get((name, c)) for name in network.trainers for c in range(5)
        ):
            network.happen()
        for _ in range(rng.randrange(120)):
            network.happen()
        if any(trainer.machine.step >= 5 for trainer in network.trainers.values()):
            continue
        network.kill_seat(rng.randrange(3))
        network.run().check_ended()
        assert set(network.versions.values()) == {5}
