"""Thousands of jobs that change their views hold every invariant, and each invariant catches a
machine that breaks it. `python -m tests.simulation --views --seeds 3000000:4000000` is the long
form."""

import msgspec
import pytest

from paceline.protocol.actions import AllReduce, Lost, Send
from paceline.protocol.collectives import (
    HybridMachine,
    Made,
    Reduced,
    Stretched,
    SumStretch,
    hosts_of,
)
from paceline.protocol.coordinating import Coordinator
from paceline.protocol.views import End, Enroll, Participant, Position, View
from tests.simulation.views import World, failing, simulate

SEEDS = range(3_000_000, 3_020_000)


def test_twenty_thousand_jobs_hold():
    assert failing(SEEDS) == {}


def test_what_they_are_to_survive_happens_often_enough_to_matter():
    worlds = [simulate(seed) for seed in range(1000)]
    views = [world.coordinator.view for world in worlds if world.coordinator.view is not None]
    assert sum(world.is_cut_off for world in worlds) > 50
    assert sum(bool(world.let_in) for world in worlds) > 200
    assert sum(view.number > 3 for view in views) > 100
    restarted = sum(len(world.numbers) > world.announced for world in worlds)
    assert restarted > 50, "a failure during a change starts it again"


class AnnouncesTooSoon(Coordinator):
    """Invariant: participants agree on their position; it waits for one report only."""

    def _derive(self):
        if self.view is not None and self._asked is not None and self._positions:
            known = self._positions.values()
            for worker in set(self.remaining) - self._positions.keys():
                self._positions[worker] = Position(worker, 0, min(p.exchanges for p in known))
        return super()._derive()


class NeverAsksAgain(Coordinator):
    """Invariant: progress; a failure during a change does not start it again."""

    def _must_ask(self):
        return self._asked is None and super()._must_ask()


class ForgetsWhoIsBehind(Coordinator):
    """Invariant: each exchange once, with one result; those behind make it without the others."""

    def _tell(self, view):
        return super()._tell(msgspec.structs.replace(view, behind=()))


class LetsInAStepEarlier(Coordinator):
    """Invariant: a worker joins at a step that no participant has begun."""

    def _tell(self, view):
        first = max(0, view.first_step - 1) if view.joined else view.first_step
        return super()._tell(msgspec.structs.replace(view, first_step=first))


class LetsInBeforeTheLastHasItsState(Coordinator):
    """Invariant: progress; a source gives the state of one view at a time."""

    def _derive(self):
        self._stateless.clear()
        return super()._derive()


class CountsStrangers(Coordinator):
    """Invariant: only participants fail."""

    def _lose(self, worker):
        super()._lose(worker)
        if self.view is not None and not self.is_over:
            self._failed.add(worker)


class ForgetsWhoLeaves(Coordinator):
    """Invariant: nothing waits for a participant that is done before the others."""

    def _take(self, position):
        super()._take(msgspec.structs.replace(position, leaves=False))


class LetsLeaveAtOnce(Coordinator):
    """Invariant: one result of each exchange; a participant leaves with one that others lack."""

    def _tell(self, view):
        leaving = tuple(w for w in view.participants if w in self._leaving)
        if leaving:
            staying = tuple(w for w in view.participants if w not in leaving)
            behind = tuple(w for w in view.behind if w in staying)
            view = msgspec.structs.replace(view, participants=staying, behind=behind, left=leaving)
            view = msgspec.structs.replace(view, hosts=("",) * len(staying))
            self._leaving.clear()
        return super()._tell(view)


class LeavesCandidatesWaiting(Coordinator):
    """Invariant: a job that is over ends the workers that would join it."""

    def _dismiss(self, workers, why):
        return super()._dismiss(set(workers) & set(self.remaining), why)


class GoesOnAloneWithoutTheCoordinator(Participant):
    """Invariant: nothing waits for a coordinator that has failed."""

    def handle(self, event):
        return [] if isinstance(event, Lost) else super().handle(event)


class ReportsWhereItWas(Participant):
    """Invariant: a position answers the change that asked for it."""

    def _forget_position(self):
        pass


MUTANTS = [
    AnnouncesTooSoon,
    NeverAsksAgain,
    ForgetsWhoIsBehind,
    LetsInAStepEarlier,
    LetsInBeforeTheLastHasItsState,
    CountsStrangers,
    ForgetsWhoLeaves,
    LetsLeaveAtOnce,
    LeavesCandidatesWaiting,
    GoesOnAloneWithoutTheCoordinator,
    ReportsWhereItWas,
]


def how(mutant):
    return {"coordinator" if issubclass(mutant, Coordinator) else "participant": mutant}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_invariant_catches_a_machine_that_breaks_it(mutant):
    for start in range(0, 4000, 250):
        if failing(range(start, start + 250), **how(mutant)):
            return
    raise AssertionError("no schedule catches it")


class HostWorld(World):
    """The exchange is `hybrid`'s own: flags that members of a host see even if their author has
    failed since, and sums of leaders that reach some of them and not others."""

    buckets = 2

    def __init__(self, seed, *, leaders_stay=False):
        super().__init__(seed)
        self.leaders_stay = leaders_stay
        self.machines, self.flags, self.asked = {}, {}, {}

    def enter(self, worker):
        super().enter(worker)
        here = worker.group, worker.rank, worker.step
        if here not in self.machines:
            group = range(self.newest) if self.leaders_stay else worker.group
            mates = [[group[at] for at in places] for places in hosts_of(w % 2 for w in group)]
            self.machines[here] = HybridMachine(worker.rank, mates, self.buckets, step=worker.step)
        for bucket in range(self.buckets):
            self.sum(worker, Made(bucket))

    def end_exchange(self, worker, result):
        """It ends by its machine, or with the result that another participant hands over."""
        machine = self.machines.get((worker.group, worker.rank, worker.step))
        if worker.is_inside and result is worker.group and machine.step == worker.step:
            self.advance(worker)
        else:
            super().end_exchange(worker, result)

    def advance(self, worker):
        here = worker.group, worker.rank, worker.step
        if self.flags.get(here):
            self.sum(worker, self.flags[here].pop(0))
            return
        for bucket in range(self.buckets):
            leaders, got = self.asked.get((worker.group, worker.step, bucket), ({}, set()))
            if worker.rank in leaders.keys() - got and leaders[worker.rank] <= leaders.keys():
                got.add(worker.rank)
                self.sum(worker, Reduced(bucket))
                return

    def sum(self, worker, event):
        step = worker.step
        here = worker.group, worker.rank, step
        for action in self.machines[here].handle(event):
            match action:
                case Send(to, message):
                    mate = int(to.removeprefix("worker"))
                    self.flags.setdefault((worker.group, mate, step), []).append(message)
                case SumStretch(bucket):
                    self.sum(worker, Stretched(bucket))
                case AllReduce(bucket, leaders):
                    asked = self.asked.setdefault((worker.group, step, bucket), ({}, set()))
                    asked[0][worker.rank] = set(leaders)


def run_hosts(seeds, **how):
    for seed in seeds:
        HostWorld(seed, **how).run().check()


def test_hosts_that_lose_members_and_leaders_make_the_same_exchanges():
    run_hosts(range(1000))


def test_hosts_with_a_leader_that_has_failed_are_caught():
    with pytest.raises(AssertionError, match="does not come to an end"):
        run_hosts(range(200), leaders_stay=True)


def announced(coordinator, events):
    """The view that the last of these events leads to."""
    for event in events:
        actions = coordinator.handle(event)
    return next(action.message for action in actions if isinstance(action.message, View))


def after_failure(*positions, failed=2):
    coordinator = Coordinator(len(positions) + 1)
    ranks = [*(position.worker for position in positions), failed]
    events = [*map(Enroll, ranks), Lost(f"worker{failed}")]
    return announced(coordinator, [*events, *positions])


def test_participants_ahead_hand_over_and_the_failed_part_is_counted():
    view = after_failure(
        Position(0, 2, 7, weight=1.5, samples=12, next_step=4),
        Position(1, 2, 6, weight=0.75, samples=6, step=4, next_step=5),
    )
    assert (view.source, view.behind, view.failed) == (0, (1,), (2,))
    assert view.unseen == 6, "24 in all: what counts 3 together"
    assert (view.step, view.first_step) == (4, 5)


def test_a_participant_that_keeps_the_result_is_the_source():
    positions = Position(0, 2, 7, keeps=False), Position(1, 2, 6), Position(3, 2, 7)
    assert after_failure(*positions).source == 3


def test_without_the_result_that_some_lack_the_job_ends():
    coordinator = Coordinator(3)
    events = [*map(Enroll, range(3)), Lost("worker2"), Position(0, 2, 7, keeps=False)]
    for event in events:
        coordinator.handle(event)
    ends = [action.message for action in coordinator.handle(Position(1, 2, 6))]
    assert len(ends) == 2
    assert all(isinstance(end, End) and "has changed the gradients" in end.why for end in ends)


def test_a_worker_that_fails_before_all_have_met_ends_the_job():
    coordinator = Coordinator(3)
    coordinator.handle(Enroll(0))
    coordinator.handle(Enroll(1))
    (action,) = coordinator.handle(Lost("worker1"))
    assert action == Send(
        "worker0", End("worker1 failed before all workers had met; start the job again.")
    )
