"""Workers come and go while messages arrive in any order, some twice: what must hold in every run.

`Network` checks at every moment that a gradient is applied at most once and that nobody is ahead of
what staleness allows; here the run must also end. MUTANTS are broken machines, each of which must
be caught by these very checks.
"""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import spec
from paceline.errors import ExchangeError
from paceline.protocol import admission
from paceline.protocol.actions import (
    Asked,
    Assigned,
    CrewChange,
    Install,
    Lost,
    Ready,
    Send,
)
from paceline.protocol.chunks import ParameterSize
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.messages import (
    Admitted,
    Answer,
    Assign,
    AssignState,
    Chosen,
    Cut,
    Doubt,
    Doubted,
    Gathered,
    Gone,
    Inquire,
    Leave,
    Newcomer,
    Pull,
    Push,
    Sealed,
    Stop,
    Vow,
)
from paceline.protocol.plan import Shape, make_plan
from paceline.protocol.seat import SeatMachine
from tests.protocol.network import Network, make
from tests.protocol.trainer import BEGUN_LATE

MODES = [
    {"mode": "sync"},
    {"mode": "bounded", "staleness": 0},
    {"mode": "bounded", "staleness": 2},
    {"mode": "quorum", "quorum": 1},
    {"mode": "quorum"},
    {"mode": "async"},
]
plots = st.lists(
    st.tuples(st.sampled_from(["join", "visit", "guest", "stay", "kill"]), st.integers(0, 60)),
    min_size=1,
    max_size=5,
)  # what happens, and how many events later
STEPS_OF_ONE_WHO = {"visit": 0, "guest": 4, "stay": 20}
"""Leaves at once, or in the middle of the job; would go on when the others have finished."""


def a_way(rng, plan):
    """From some worker, one that is still to come perhaps, to some seat, or back; or none."""
    worker, seat = f"worker{rng.randrange(plan.workers + 2)}", rng.choice(plan.seats).member
    return rng.choice([None, (worker, seat), (seat, worker)])


def live(rng, network, plot):
    """Let changes happen as plotted, then the rest of the run; returns the network."""
    newest = network.plan.workers
    for change, events in plot:
        for _ in range(events):
            network.happen()
        able = [t.machine.worker for t in network.trainers.values() if not t.done]
        # Of those who serve `test_spares.py` says when they can be lost.
        able = [w for w in able if network.plan.seat_of(f"worker{w}") is None]
        able = [worker for worker in able if network.can_lose(worker)]
        if change != "kill":
            network.join(newest, STEPS_OF_ONE_WHO.get(change))
            newest += 1
        elif able:
            network.kill(rng.choice(able))
    return network.run()


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    workers=st.integers(1, 4),
    servers=st.integers(0, 3),
    chunks=st.integers(1, 5),
    steps=st.integers(1, 8),
    mode=st.sampled_from(MODES),
    plot=plots,
    script=st.fixed_dictionaries(
        {name: st.booleans() for name in ("twice", "schedule", "touches", "hasty")}
    ),
)
def test_whoever_comes_or_goes_the_others_end(
    seed, workers, servers, chunks, steps, mode, plot, script
):
    rng = random.Random(seed)
    whole = mode["mode"] in ("sync", "bounded") and seed % 2 == 0
    plan = make(workers, servers, chunks, whole=whole, **mode)
    script["touches"] &= plan.rules.exclusive
    network = Network(rng, plan, steps, slow=a_way(rng, plan), **script)
    live(rng, network, plot).check_ended()
    rates = [work.settings[0]["lr"] for work in network.works if work.settings]
    assert BEGUN_LATE not in rates, "a newcomer's schedule counts"


def test_a_connection_of_an_unadmitted_worker_that_closes_holds_up_no_other_worker():
    """The job ends while three workers ask to join; one of them is turned away."""
    rng = random.Random(42690)
    plan = make(4, 0, 2, whole=True, mode="sync")
    network = Network(rng, plan, 2, slow=a_way(rng, plan), touches=True)
    plot = [("join", 41), ("guest", 57), ("join", 60), ("join", 60)]
    live(rng, network, plot).check_ended()


@pytest.mark.parametrize("mode", MODES[:3], ids=["sync", "bounded-0", "bounded-2"])
def test_one_who_joins_takes_part_from_one_step_on_in_every_chunk(mode):
    took_part = 0
    for seed in range(60):
        rng = random.Random(seed)
        network = Network(rng, make(2, 2, 4, **mode), 9, schedule=True)
        live(rng, network, [("join", rng.randrange(80))]).check_ended()
        firsts = set()
        for chunk in range(4):
            works = [w for w in network.works if w.chunk == chunk and w.kind != "measure"]
            steps = [work.step for work in works if len(work.parts) == 3]
            assert steps == list(range(9))[9 - len(steps) :], "it was left out again"
            firsts.add(steps[0] if steps else None)
        assert len(firsts) == 1, "chunks of one step were summed over different workers"
        took_part += firsts != {None}
    assert took_part > 20


def test_a_machine_starts_at_any_step_and_version():
    plan = make(2, 1, 2)
    network = Network(random.Random(0), plan, 103)
    network.members["server0"].seat = SeatMachine(plan, 0, version=100)
    network.versions.update({0: 100, 1: 100})
    for worker in (0, 1):
        name = f"worker{worker}"
        machine = ExchangeMachine(plan, worker, step=100)
        network.members[name].worker = network.trainers[name].machine = machine
    network.run().check_ended()
    assert {work.step for work in network.works} == {100, 101, 102}


def test_only_those_are_named_that_the_open_step_waits_for():
    seat = SeatMachine(make(4, 1, 1, mode="quorum", quorum=2), 0)
    assert seat.missing(0) == [0, 1, 2, 3]
    seat.handle(Push(0, 0, 0, 0))
    assert seat.missing(0) == [1, 2, 3]
    seat.handle(Chosen(0, (0, 2)))
    assert seat.missing(0) == [2], "workers 1 and 3 are not in the quorum"
    seat = SeatMachine(make(3, 1, 1), 0)
    for worker in (0, 2):
        seat.handle(Push(worker, 0, 0, 0))
    assert seat.missing(0) == [1]
    seat.handle(Push(1, 0, 0, 0, hold=True))
    assert seat.missing(0) == [1], "its gradient is there, and held until it commits"


def test_weights_are_given_out_when_they_are_there():
    seat = SeatMachine(make(1, 1, 2), 0, assigned=False)
    assert seat.handle(Pull(0, 1)) == []
    assert seat.handle(Assign(0, 0)) == [Install(Assign(0, 0))]
    answer = Send("worker0", Answer(1, 0), 1)
    assert seat.handle(Assign(0, 1)) == [Install(Assign(0, 1)), answer]


def test_what_a_worker_sets_or_asks_for_goes_to_the_one_who_serves_it():
    plan = make(1, 2, 2)
    machine, owner = ExchangeMachine(plan, 0), f"server{plan.owners[1]}"
    assert machine.handle(Assigned(1)) == [Send(owner, Assign(0, 1), 1, seat=True)]
    assert machine.handle(Assigned(1, state=True)) == [Send(owner, AssignState(0, 1), 1, seat=True)]
    assert machine.handle(Asked(1)) == [Send(owner, Inquire(0, 1), seat=True)]


def test_a_step_does_not_begin_before_the_weights_of_the_one_before_have_come():
    machine = ExchangeMachine(make(1, 1, 2), 0)
    for chunk in (0, 1):
        machine.handle(Ready(chunk))
    machine.handle(Answer(0, 1, step=0))
    with pytest.raises(ExchangeError, match=r"step 1 begins before the weights of \[1\] came"):
        machine.handle(Ready(0))


def test_where_everyone_takes_its_own_steps_the_job_is_over_with_the_last_of_them():
    seat = SeatMachine(make(2, 1, 1, mode="async"), 0)
    seat.handle(Admitted(worker=2, generation=1, step=0, crew=(0, 1, 2)))
    seat.handle(Push(2, 0, 0, 0, generation=1))
    seat.done(seat.take())
    seat.handle(Leave(0, 2))
    (stop,) = [a.message for a in seat.handle(Leave(1, 5)) if isinstance(a.message, Stop)] or [None]
    assert stop is None, "it has taken one step of five"
    assert [a.message for a in seat.handle(Push(2, 0, 5, 1, generation=1))] == [
        Stop("the others have finished after 5 steps, and so has worker2.", over=5)
    ]


class ForgetsWhoCame(SeatMachine):
    """Takes a gradient again when it comes again."""

    def _push(self, push):
        self._slots[push.chunk].seen.clear()
        return super()._push(push)


class WaitsForTheLost(SeatMachine):
    def _lose(self, member):
        return []


class ForgetsTheNewcomer(SeatMachine):
    """Welcomes a worker and takes its first step without it."""

    def _join(self, event):
        actions = super()._join(event)
        if event.worker in self.roster._stays:
            self.roster._stays[event.worker].since += 1
            self.roster._settle()
        return actions


class AnswersOneStepEarly(SeatMachine):
    def _wait(self, slot, index, push, late):
        super()._wait(slot, index - 1, push, late)


class IgnoresTheNews(ExchangeMachine):
    """A worker that was admitted and starts at step 0."""

    def _admitted(self, admitted):
        actions = super()._admitted(admitted)
        self.step = 0
        return actions


class DoesNotTellOfNewcomers(SeatMachine):
    def _join(self, event):
        return [a for a in super()._join(event) if not isinstance(a.message, Newcomer)]


SEATS = [
    ForgetsWhoCame,
    WaitsForTheLost,
    ForgetsTheNewcomer,
    AnswersOneStepEarly,
    DoesNotTellOfNewcomers,
]
MUTANTS = [
    *((ExchangeMachine, seat) for seat in SEATS),
    (IgnoresTheNews, SeatMachine),
]


def is_caught(machines, seeds=range(150)):
    for seed in seeds:
        rng = random.Random(seed)
        plan = make(3, 2, 3, mode="bounded", staleness=rng.randrange(2))
        network = Network(rng, plan, 8, machines=machines, twice=True, slow=a_way(rng, plan))
        plot = [("join", rng.randrange(60)), ("kill", rng.randrange(60))]
        try:
            live(rng, network, plot).check_ended()
        except (AssertionError, ExchangeError, KeyError):
            return True
    return False


@pytest.mark.parametrize("machines", MUTANTS, ids=lambda pair: "-".join(m.__name__ for m in pair))
def test_a_broken_machine_is_caught(machines):
    assert is_caught(machines)
    assert not is_caught((ExchangeMachine, SeatMachine), range(20))


@pytest.mark.parametrize("broken", ["closes too soon", "admits too early"])
def test_a_broken_admission_is_caught(monkeypatch, broken):
    """Without the arbiter's patience some chunk closes the newcomer's first step without it."""
    if broken == "closes too soon":
        never = property(lambda self: 10**9, lambda self, limit: None)
        monkeypatch.setattr(admission.Admission, "limit", never, raising=False)
    else:
        monkeypatch.setattr(admission, "LEEWAY_STEPS", -1)
    assert is_caught((ExchangeMachine, SeatMachine), range(2000))


def test_losses_are_told_once_and_stop_what_cannot_go_on():
    plan = make(3, 2, 2)
    seats = [SeatMachine(plan, seat) for seat in (0, 1)]
    told = [send for seat in seats for send in seat.handle(Lost("worker1"))]
    assert {(send.to, send.message) for send in told} == {
        ("worker0", Gone(1)),
        ("worker2", Gone(1)),
    }
    machine = ExchangeMachine(plan, 0)
    heard = [action for send in told for action in machine.handle(send.message)]
    assert heard == [CrewChange(0, lost=(1,))]
    assert seats[0].handle(Lost("worker1")) == []


RULES = [
    ({"mode": "sync"}, [2], "worker2 was lost in step 1, and mode=sync waits for every worker."),
    ({"mode": "async"}, [2, 1, 0], "worker0 was lost in step 1, and it spoke for all workers."),
    (
        {"mode": "quorum", "quorum": 2},
        [2, 1],
        "worker1 was lost in step 1, and 1 of the 2 workers that it takes are left.",
    ),
]


@pytest.mark.parametrize(("mode", "losses", "sentence"), RULES, ids=["sync", "async", "quorum"])
def test_every_mode_stops_or_goes_on_by_its_rule(mode, losses, sentence):
    """And whoever is left hears why before the seat is gone."""
    sizes = [ParameterSize(name="p", elements=16)]
    plan = make_plan(sizes, spec.Server(**mode), Shape(workers=3, servers=1))
    network = Network(random.Random(0), plan, 2)
    seat = network.members["server0"]
    for worker in range(3):
        seat.receive(Push(worker, 0, 0, 0), for_seat=True)
    network.flight.clear()
    for worker in losses[:-1]:
        seat.lose(f"worker{worker}")
        assert not [f for f in network.flight if isinstance(f[3], Stop)]
    with pytest.raises(ExchangeError) as raised:
        seat.lose(f"worker{losses[-1]}")
    assert str(raised.value) == sentence
    left = sorted({0, 1, 2} - set(losses))
    told = {
        to
        for kind, _, to, what in network.flight
        if kind == "message" and what.message == Stop(sentence)
    }
    assert told >= {f"worker{worker}" for worker in left}


def test_one_who_has_ended_is_not_lost():
    seat = SeatMachine(make(2, 1, 1), 0)
    seat.handle(Leave(1, 0))
    assert seat.handle(Lost("worker1")) == []
    assert seat.roster.ended(0) == {1: 0}


def test_a_worker_that_has_vowed_seals_no_step_with_the_lost():
    machine = ExchangeMachine(make(3, 2, 2, whole=True), 0)
    assert machine.handle(Gathered(0, 0, (0, 1, 2))) == []
    told = [send.message for send in machine.handle(Doubted(0, (1,), 0))]
    assert told == [Doubt(0, (1,))], "the other seat may not have noticed"
    (vow,) = machine.handle(Doubted(1, (1,), 0))
    assert (vow.to, vow.message) == ("server0", Vow(0, (1,), 0))
    assert machine.handle(Gathered(1, 0, (0, 1, 2))) == [], "it was on its way for long"
    crew, *told = machine.handle(Cut((1,), 0))
    assert crew == CrewChange(2, lost=(1,), cut=0)
    assert {send.to for send in told} == {"server0", "server1"}
    assert machine.handle(Gathered(0, 0, (0, 2))) == []
    sealed = machine.handle(Gathered(1, 0, (0, 2)))
    assert [(send.to, send.message) for send in sealed] == [
        ("server0", Sealed(0, 0)),
        ("server1", Sealed(0, 0)),
    ]


def test_one_who_is_doubted_and_lives_is_told_that_the_others_go_on():
    machine = ExchangeMachine(make(3, 2, 2, whole=True), 1)
    with pytest.raises(ExchangeError, match="worker1 lost a connection, and the others go on"):
        machine.handle(Doubted(0, (1,), 0))


def test_a_seat_alone_cuts_at_once_and_weighs_by_samples():
    seat = SeatMachine(make(3, 1, 1, whole=True), 0)
    for worker, weight in ((0, 0.9), (1, 1.2), (2, 0.9)):
        if worker != 1:
            seat.handle(Push(worker, 0, 0, 0, weight=weight))
    assert seat.take() is None
    told = [action.message for action in seat.handle(Lost("worker1"))]
    assert told == [Cut((1,), 0), Cut((1,), 0)]
    work = seat.take()
    assert work.parts == ((0, 0, 1 / 1.8), (2, 0, 1 / 1.8))


def test_a_seat_that_serves_nothing_names_the_step_of_the_worker_beside_it():
    sizes, shape = [ParameterSize(name="p", elements=16)], Shape(workers=2)
    plan = make_plan(sizes, spec.Server(), shape)
    assert plan.chunks_of(1) == []
    with pytest.raises(ExchangeError, match="worker0 was lost in step 31, and mode=sync"):
        SeatMachine(plan, 1).handle(Lost("worker0", step=31))
    plan = make_plan(sizes, spec.Server(mode="async"), shape)
    with pytest.raises(ExchangeError, match="worker0 was lost, and it spoke for all"):
        SeatMachine(plan, 1).handle(Lost("worker0", step=31))


def test_where_others_go_on_they_do_without_worker_0_too():
    sizes = [ParameterSize(name="p", elements=16)]
    shape = Shape(workers=3, servers=1)
    seat = SeatMachine(make_plan(sizes, spec.Server(mode="async"), shape), 0)
    with pytest.raises(ExchangeError, match="worker0 was lost in step 0, and it spoke for all"):
        seat.handle(Lost("worker0"))
    shape = msgspec.structs.replace(shape, goes_on=True)
    seat = SeatMachine(make_plan(sizes, spec.Server(), shape), 0)
    seat.handle(Lost("worker2"))
    (told,) = seat.handle(Lost("worker0"))
    assert told == Send("worker1", Cut((0,), 0))
    with pytest.raises(ExchangeError, match="0 of the 1 workers that it takes are left"):
        seat.handle(Lost("worker1"))
