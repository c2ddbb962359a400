"""Workers and seats on a network that delivers in any order: what must hold in every run.

MUTANTS are broken protocols: each must be caught, or the checks above them prove nothing.
"""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.protocol.actions import Departed, Ready, Send, Used
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.messages import Answer, Push, Reorder
from paceline.protocol.seat import SeatMachine
from tests.protocol.network import Network, make

sizes = st.tuples(
    st.integers(1, 4), st.integers(0, 3), st.integers(1, 7), st.integers(1, 4)
)  # workers, servers, chunks, steps
windows = st.sampled_from([1, 2, 100])
randoms = st.integers(0, 1 << 32).map(random.Random)
scripts = st.fixed_dictionaries(
    {
        "schedule": st.booleans(),
        "touches": st.booleans(),
        "twice": st.booleans(),
        "shared": st.booleans(),
        "skips": st.booleans(),
        "settles": st.booleans(),
    }
).map(lambda script: script | {"settles": script["settles"] and not script["twice"]})
"""Pulls have no number: an answer that came twice would be taken for that of the next."""


def run(rng, size, script=None, **options):
    workers, servers, chunks, steps = size
    plan = make(workers, servers, chunks, **options)
    return Network(rng, plan, steps, **(script or {})).run()


def check_every_gradient_counted(network):
    counts = Counter(network.dropped)
    for chunk, worker, _, _ in network.applied:
        counts[worker, chunk] += 1
    chunks, workers = len(network.plan.owners), network.plan.workers
    everyone = {(w, c): network.steps for w in range(workers) for c in range(chunks)}
    assert counts == everyone


def check_sync(network):
    network.check_ended()
    check_every_gradient_counted(network)
    everyone = tuple(range(network.plan.workers))
    updates = [work for work in network.works if work.kind != "measure"]
    for update in updates:
        assert tuple(worker for worker, _, _ in update.parts) == everyone
        assert sum(weight for _, _, weight in update.parts) == pytest.approx(1)
    assert set(Counter(update.chunk for update in updates).values()) == {network.steps}


def check_settings(network):
    """The update of a step goes by the settings of that very step."""
    for work in network.works:
        if work.kind != "measure":
            assert work.settings == [{"lr": float(work.step)}]


@settings(max_examples=150, deadline=None)
@given(rng=randoms, size=sizes, window=windows, script=scripts)
def test_sync_sums_every_worker_once_a_step_in_any_order(rng, size, window, script):
    network = run(rng, size, script, window=window)
    check_sync(network)
    assert all(push.step == push.version for push in network.pushes)
    if script["schedule"]:
        check_settings(network)
    scaled = {work.scale for work in network.works if work.kind != "measure"}
    assert scaled == {0.5 if script["touches"] else 1.0}


@settings(max_examples=150, deadline=None)
@given(rng=randoms, size=sizes, window=windows, staleness=st.integers(0, 3), script=scripts)
def test_bounded_never_exceeds_its_staleness(rng, size, window, staleness, script):
    script["touches"] &= staleness == 0
    network = run(rng, size, script, window=window, mode="bounded", staleness=staleness)
    check_sync(network)
    measured = [m.seat.staleness for m in network.members.values() if m.seat is not None]
    assert max((max(c) for seat in measured for c in seat.values()), default=0) <= staleness
    if script["schedule"]:
        check_settings(network)


def test_bounded_lets_a_worker_run_ahead():
    ahead = 0
    for seed in range(20):
        network = run(random.Random(seed), (3, 1, 2, 4), mode="bounded", staleness=2)
        ahead = max(ahead, max(push.step - push.version for push in network.pushes))
    assert ahead == 2


@settings(max_examples=150, deadline=None)
@given(rng=randoms, size=sizes, window=windows, script=scripts)
def test_async_applies_every_gradient_by_itself(rng, size, window, script):
    script["touches"] = False  # needs a whole step
    network = run(rng, size, script, window=window, mode="async")
    network.check_ended()
    check_every_gradient_counted(network)
    assert all(len(work.parts) == 1 for work in network.works)
    assert not network.dropped
    if script["schedule"]:  # its own step's settings, whatever the chunk has seen meanwhile
        assert all(w.settings == [{"lr": float(w.parts[0][1])}] for w in network.works)


@settings(max_examples=100, deadline=None)
@given(rng=randoms, size=sizes, mode=st.sampled_from(["async", "bounded"]))
def test_a_staleness_aware_rate_is_divided_by_what_its_gradients_lacked(rng, size, mode):
    bound = {"staleness": 2} if mode == "bounded" else {}
    network = run(rng, size, mode=mode, staleness_aware=True, **bound)
    network.check_ended()
    version = {(p.chunk, p.worker, p.step): p.version for p in network.pushes}
    for work in network.works:
        behind = [work.step - version[work.chunk, worker, step] for worker, step, _ in work.parts]
        assert work.rate_factor == pytest.approx(1 / (1 + sum(behind) / len(behind)))


def test_a_plain_rate_is_left_alone():
    network = run(random.Random(1), (3, 1, 2, 4), mode="async")
    assert {work.rate_factor for work in network.works} == {1.0}


@settings(max_examples=150, deadline=None)
@given(rng=randoms, size=sizes, window=windows, script=scripts, data=st.data())
def test_quorum_counts_late_gradients_and_loses_none(rng, size, window, script, data):
    script["touches"] = False  # needs a step that is the worker's own
    quorum = data.draw(st.integers(1, size[0]))
    network = run(rng, size, script, window=window, mode="quorum", quorum=quorum)
    network.check_ended()
    check_every_gradient_counted(network)
    seats = [m.seat for m in network.members.values() if m.seat is not None]
    assert sum(network.dropped.values()) == sum(sum(s.late.values()) for s in seats)
    told = sum(trainer.machine.late_chunks for trainer in network.trainers.values())
    assert told == sum(network.dropped.values()), "a worker was not told that it was late"
    if quorum == size[0]:
        assert not network.dropped
    whose = {}
    for work in network.works:
        workers = [worker for worker, _, _ in work.parts]
        assert workers == whose.setdefault(work.step, workers), "chunks of one step differ"


def test_quorum_does_drop_in_some_run():
    assert run(random.Random(3), (4, 1, 3, 4), mode="quorum", quorum=2).dropped


def test_a_step_whose_gradients_the_script_needs_is_only_averaged():
    network = run(random.Random(0), (2, 2, 4, 9), {"mean": True, "skips": True})
    check_sync(network)
    assert {work.kind for work in network.works} == {"mean"}
    assert any(work.absent for work in network.works), "nobody left the same parameter out"
    assert {w.kind for w in run(random.Random(0), (2, 1, 2, 2), update="worker").works} == {"mean"}


def test_workers_that_disagree_on_who_updates_are_told():
    plan = make(2, 1, 1)
    network = Network(random.Random(0), plan, 1)
    network.trainers["worker1"].script = {"mean": True}
    with pytest.raises(ExchangeError, match="worker 1 changed weights or gradients"):
        network.run()


def test_a_worker_that_ends_early_is_named_where_steps_are_exclusive():
    network = Network(random.Random(0), make(3, 1, 2), 3)
    network.trainers["worker1"].steps = 2
    with pytest.raises(
        ExchangeError, match="worker1 ended after 2 steps, and others are at step 3"
    ):
        network.run()


@pytest.mark.parametrize("mode", ["async", "quorum"])
def test_a_worker_that_ends_early_is_noted_where_they_are_not(mode):
    network = Network(random.Random(1), make(3, 1, 2, mode=mode), 4)
    network.trainers["worker1"].steps = 1
    network.run().check_ended()
    assert any("worker1 ended after" in note for note in network.notes)


class OpensOnAnswer(ExchangeMachine):
    """The window opens only when the summed result returns: deadlocks (DESIGN section 7)."""

    def handle(self, event):
        if isinstance(event, Departed):
            return []
        actions = super().handle(event)
        if isinstance(event, Answer):
            actions += super().handle(Departed(event.chunk))
        return actions


class ForgetsAChunk(ExchangeMachine):
    def _fill(self):
        actions = super()._fill()
        return actions[:-1] if self.step > 1 else actions


class ClosesEarly(SeatMachine):
    def _needed(self, index):
        needed = super()._needed(index)
        return frozenset(sorted(needed)[1:]) or needed


class AnswersAtOnce(SeatMachine):
    def _wait(self, slot, index, push, late):
        super()._wait(slot, -1, push, late)


class TakesTheLastSettings(SeatMachine):
    """As it was: what arrived last counts, whichever step it was for."""

    def _decide(self, chunk, index, step, commits):
        work = super()._decide(chunk, index, step, commits)
        known = self._settings._told.get(work.parts[0][0]) if work.parts else None
        return msgspec.structs.replace(work, settings=known[max(known)]) if known else work


class CountsUndoneWork(SeatMachine):
    """Answers when an update is decided, not when it is done."""

    def _close(self, chunk, slot):
        before, slot.version = slot.version, slot.closed
        actions = super()._close(chunk, slot)
        slot.version = slot.closed
        actions += self._answer(slot)
        slot.version = before
        return actions


MUTANTS = [
    (OpensOnAnswer, SeatMachine),
    (ForgetsAChunk, SeatMachine),
    (ExchangeMachine, ClosesEarly),
    (ExchangeMachine, AnswersAtOnce),
    (ExchangeMachine, TakesTheLastSettings),
    (ExchangeMachine, CountsUndoneWork),
]


def is_caught(machines, seeds):
    for seed in seeds:
        plan = make(3, 2, 6, window=1, mode="bounded", staleness=1 if seed % 2 else 0)
        network = Network(random.Random(seed), plan, 4, machines=machines, schedule=True)
        try:
            check_sync(network.run())
            check_settings(network)
        except (AssertionError, ExchangeError, KeyError):
            return True
    return False


@pytest.mark.parametrize("machines", MUTANTS, ids=lambda pair: "-".join(m.__name__ for m in pair))
def test_a_broken_machine_is_caught(machines):
    assert is_caught(machines, range(40))
    assert not is_caught((ExchangeMachine, SeatMachine), range(10))


def sends(actions):
    return [action.message.chunk for action in actions]


def test_the_most_urgent_chunk_goes_next_whoever_serves_it():
    """One window for all seats: a link carries chunks in the order in which they were dealt."""
    machine = ExchangeMachine(make(1, 2, 6, window=1), 0)
    made = [sends(machine.handle(Ready(chunk))) for chunk in (5, 4, 3, 0, 1, 2)]
    assert made == [[5], [4], [], [], [], []]
    assert [sends(machine.handle(Departed(chunk))) for chunk in (5, 4)] == [[0], [1]]


def test_while_gradients_are_made_the_newest_stretch_goes_first_in_the_order_made():
    """So that workers a moment apart send the same chunks, and servers can answer them."""
    machine = ExchangeMachine(make(1, 2, 12, window=1), 0)
    made = [sends(machine.handle(Ready(chunk))) for chunk in (11, 10, 9, 8, 7, 6)]
    assert made == [[11], [10], [], [], [], []]
    assert [sends(machine.handle(Departed(chunk))) for chunk in (11, 10, 7)] == [[7], [6], [9]]
    for chunk in range(5, -1, -1):
        assert sends(machine.handle(Ready(chunk))) == []
    assert [sends(machine.handle(Departed(chunk))) for chunk in (6, 9)] == [[0], [1]]


def test_a_real_order_of_use_is_told_to_the_seats_and_orders_their_work():
    machine = ExchangeMachine(make(1, 1, 3), 0)
    (told,) = machine.handle(Used((2, 1, 0)))
    assert told == Send("server0", Reorder((2, 1, 0)), seat=True)
    assert ExchangeMachine(make(2, 1, 3), 1).handle(Used((2, 1, 0))) == [], "once is enough"
    seat = SeatMachine(make(1, 1, 3), 0)
    for chunk in (1, 0, 2):
        seat.handle(Push(0, chunk, 0, 0))
    seat.handle(told.message)
    assert [seat.take().chunk for _ in range(3)] == [2, 1, 0]
    assert seat.take() is None


def test_what_stays_in_this_process_does_not_wait_for_the_link():
    plan = make(2, 0, 4, window=1)
    assert plan.owners == (0, 1, 0, 1)
    machine = ExchangeMachine(plan, 0)
    made = [sends(machine.handle(Ready(chunk))) for chunk in (3, 1, 2, 0)]
    assert made == [[3], [1], [2], [0]]
