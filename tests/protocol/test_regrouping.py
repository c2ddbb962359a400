"""Workers that lose each other, with every order of words, losses and exchanges that chance finds.

Here an exchange ends on a worker once all of its group have entered it, as a sum does; who dies may
have entered it before. What a turn came to is the group that made it: all who are left must have
the same for each turn, and each turn once.
"""

import random

import pytest

from paceline.protocol.actions import AllReduce, Lost, Send
from paceline.protocol.collectives import (
    HybridMachine,
    Made,
    Reduced,
    Stretched,
    SumStretch,
    hosts_remaining,
)
from paceline.protocol.regrouping import (
    Heard,
    Here,
    Over,
    Refuse,
    Regroup,
    RegroupMachine,
    Report,
    Stopped,
    decide,
)

TURNS = 6


class Worker:
    def __init__(self, rank, workers):
        self.rank, self.group = rank, tuple(range(workers))
        self.machine = RegroupMachine(rank, self.group)
        self.history, self.is_inside, self.is_over, self.is_done = [], False, False, False
        self.waits, self.regroup = False, None

    @property
    def turn(self):
        return len(self.history)


class World:
    def __init__(self, seed, machine=RegroupMachine):
        self.chance = random.Random(seed)
        count = self.chance.randint(2, 5)
        self.workers = [Worker(rank, count) for rank in range(count)]
        for worker in self.workers:
            worker.machine = machine(worker.rank, worker.group)
        self.alive = set(range(count))
        deaths = self.chance.randint(1, count - 1)
        at_once = self.chance.random() < 0.3
        self.deaths = sorted(self.chance.randrange(5 if at_once else 150) for _ in range(deaths))
        """After so many acts: spread over the job, or close together."""
        self.words = {(a, b): [] for a in range(count) for b in range(count) if a != b}
        self.unseen = set()
        """(who is left, who is lost): not noticed yet."""
        self.entered = {}

    def run(self):
        for number in range(20_000):
            while self.deaths and number >= self.deaths[0]:
                self.deaths.pop(0)
                self.die(self.chance.choice(sorted(self.alive)))
            if all(self.workers[rank].is_over for rank in self.alive):
                return
            choices = list(self.possible())
            assert choices, "nobody can go on"
            act, *arguments = self.chance.choice(choices)
            act(*arguments)
        raise AssertionError("they do not come to an end")

    def possible(self):
        for rank in sorted(self.alive):
            worker = self.workers[rank]
            if worker.is_over:
                continue
            if worker.regroup is not None:
                yield from self.handing(worker)
            elif worker.waits or worker.is_done:
                pass
            elif worker.is_inside:
                yield from self.inside(worker)
                if worker.machine.lost:
                    yield self.stop, worker
            elif worker.turn < TURNS:
                yield self.enter, worker
            else:
                yield self.finish, worker
        for (sender, receiver), words in self.words.items():
            if words and receiver in self.alive:
                yield self.deliver, sender, receiver
        for left, lost in sorted(self.unseen):
            if left in self.alive and not self.words[lost, left]:
                yield self.notice, left, lost

    def inside(self, worker):
        if self.entered[worker.group, worker.turn] >= set(worker.group):
            yield self.end_turn, worker, worker.group

    def handing(self, worker):
        """What the source hands over comes, unless it is lost; others' losses may come first."""
        regroup = worker.regroup
        source = self.workers[regroup.source]
        if worker.rank in regroup.behind:
            if source.rank in self.alive and source.group == regroup.members:
                yield self.take, worker, source
        else:
            yield self.go_on, worker
        if worker.machine.lost and not worker.is_done:
            yield self.stop, worker

    def enter(self, worker):
        worker.is_inside = True
        self.entered.setdefault((worker.group, worker.turn), set()).add(worker.rank)

    def end_turn(self, worker, result):
        worker.history.append(result)
        worker.is_inside = False

    def stop(self, worker):
        worker.waits, worker.regroup = True, None
        self.tell(worker, Stopped(worker.turn))

    def finish(self, worker):
        worker.is_done = True
        self.tell(worker, Stopped(worker.turn, is_done=True))

    def take(self, worker, source):
        worker.group, worker.regroup = worker.regroup.members, None
        self.end_turn(worker, source.history[worker.turn])

    def go_on(self, worker):
        worker.group, worker.regroup = worker.regroup.members, None
        if not worker.is_done:
            self.enter(worker)

    def deliver(self, sender, receiver):
        self.tell(self.workers[receiver], self.words[sender, receiver].pop(0))

    def notice(self, left, lost):
        self.unseen.discard((left, lost))
        self.tell(self.workers[left], Lost(f"worker{lost}"))

    def die(self, rank):
        self.alive.discard(rank)
        self.unseen |= {(left, rank) for left in self.alive}
        for (sender, _), words in self.words.items():
            if sender == rank:  # what was not sent in full is lost with it
                del words[self.chance.randint(0, len(words)) :]

    def tell(self, worker, event):
        for action in worker.machine.handle(event):
            match action:
                case Send():
                    to = int(action.to.removeprefix("worker"))
                    self.words[worker.rank, to].append(action.message)
                case Regroup():
                    assert not action.refusal, action
                    worker.waits, worker.regroup = False, action
                    if worker.is_done and worker.rank not in action.behind:
                        worker.group = action.members
                case Over():
                    worker.is_over = True


class HostWorld(World):
    """The exchange is `hybrid`'s own: flags that mates see, whoever has died since, and sums of
    leaders that come to some of them and not to others."""

    buckets = 2

    def __init__(self, seed, left=hosts_remaining):
        super().__init__(seed)
        of = [self.chance.randrange(3) for _ in self.workers]
        self.hosts = [[r for r, host in enumerate(of) if host == one] for one in set(of)]
        self.left = left
        self.machines, self.flags, self.asked = {}, {}, {}

    def enter(self, worker):
        super().enter(worker)
        here = worker.group, worker.rank
        if here not in self.machines:
            hosts = self.left(self.hosts, worker.group)
            machine = HybridMachine(worker.rank, hosts, self.buckets, step=worker.turn)
            self.machines[here] = machine
        for bucket in range(self.buckets):
            self.sum(worker, Made(bucket))

    def inside(self, worker):
        if self.flags.get((worker.group, worker.rank)):
            yield self.hear, worker
        for bucket in range(self.buckets):
            leaders, got = self.asked.get((worker.group, worker.turn, bucket), ((), ()))
            asked = worker.rank in leaders and worker.rank not in got
            if asked and leaders[worker.rank] <= set(leaders):
                yield self.reduce, worker, bucket

    def hear(self, worker):
        self.sum(worker, self.flags[worker.group, worker.rank].pop(0))

    def reduce(self, worker, bucket):
        self.asked[worker.group, worker.turn, bucket][1].add(worker.rank)
        self.sum(worker, Reduced(bucket))

    def sum(self, worker, event):
        machine = self.machines[worker.group, worker.rank]
        for action in machine.handle(event):
            match action:
                case Send(to, message):
                    mate = int(to.removeprefix("worker"))
                    self.flags.setdefault((worker.group, mate), []).append(message)
                case SumStretch(bucket):
                    self.sum(worker, Stretched(bucket))
                case AllReduce(bucket, leaders):
                    key = worker.group, worker.turn, bucket
                    self.asked.setdefault(key, ({}, set()))[0][worker.rank] = set(leaders)
        if worker.is_inside and machine.step > worker.turn:
            self.end_turn(worker, worker.group)


def check(world):
    histories = {tuple(world.workers[rank].history) for rank in world.alive}
    assert len(histories) == 1, histories
    (history,) = histories
    assert len(history) == TURNS


def run_many(seeds, machine=RegroupMachine):
    run_each(seeds, lambda seed: World(seed, machine))


def run_hosts(seeds, **how):
    run_each(seeds, lambda seed: HostWorld(seed, **how))


def run_each(seeds, make):
    for seed in seeds:
        world = make(seed)
        try:
            world.run()
            check(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_who_is_left_has_made_the_same_turns_each_once():
    run_many(range(4000))


def test_hosts_that_lose_members_and_leaders_make_the_same_turns_each_once():
    run_hosts(range(1000))


def test_hosts_with_a_leader_that_is_lost_are_caught():
    with pytest.raises(AssertionError, match="nobody can go on"):
        run_hosts(range(200), left=lambda hosts, members: hosts)


def test_who_was_called_answers_and_who_has_called_does_not():
    machine = RegroupMachine(1, range(3))
    assert machine.handle(Here(2)) == [Heard(2), Send("worker2", Here(1))]
    assert machine.handle(Here(0)) == [Heard(0)]


class Hasty(RegroupMachine):
    """Does not wait until all know of the same losses."""

    @property
    def missing(self):
        return tuple(worker for worker in self.remaining if worker not in self._reports)


class Forgetful(RegroupMachine):
    """Lets those who are ahead make their turn again and leaves the others where they are."""

    def handle(self, event):
        actions = super().handle(event)
        for action in actions:
            if isinstance(action, Regroup) and self.worker in action.behind:
                behind = tuple(worker for worker in action.behind if worker != self.worker)
                others = [one for one in actions if one is not action]
                made = {name: getattr(action, name) for name in action.__struct_fields__}
                return [*others, Regroup(**{**made, "behind": behind})]
        return actions


@pytest.mark.parametrize("broken", [Hasty, Forgetful])
def test_a_broken_machine_is_caught(broken):
    with pytest.raises((AssertionError, KeyError)):
        run_many(range(1000), broken)


def report(worker, turn, lost=(2,), **more):
    return Report(worker, turn, lost, **more)


def test_those_ahead_hand_over_and_the_lost_part_is_counted():
    weights = [report(0, 7, weight=1.5, samples=12), report(1, 6, weight=0.75, samples=6)]
    regroup = decide((0, 1, 2), {2}, weights)
    assert (regroup.source, regroup.behind, regroup.turn) == (0, (1,), 7)
    assert regroup.unseen == 6  # 24 in all: what counts 3 together
    assert not regroup.refusal


def test_they_go_on_with_the_step_of_who_is_furthest_and_divide_its_next_batch():
    regroup = decide((0, 1, 2), {2}, [report(0, 7, next_step=4), report(1, 6, next_step=5, step=4)])
    assert (regroup.step, regroup.since) == (4, 5)


def test_without_one_who_keeps_the_sums_nobody_goes_on():
    regroup = decide((0, 1, 2), {2}, [report(0, 7, keeps=False), report(1, 6)])
    assert "has changed the gradients" in regroup.refusal
    kept = decide((0, 1, 2, 3), {2}, [report(0, 7, keeps=False), report(1, 6), report(3, 7)])
    assert not kept.refusal
    assert kept.source == 3


def test_a_worker_that_others_report_as_lost_does_not_wait_for_them():
    machine = RegroupMachine(1, (0, 1, 2))
    machine.handle(Stopped(3))
    (refusal,) = machine.handle(Report(2, 3, lost=(1,)))
    assert refusal == Refuse("others have lost the connection to worker1.")
