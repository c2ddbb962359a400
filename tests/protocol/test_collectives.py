"""`ring`, `average` and `hybrid` as machines: same order on all, and a mismatch is told.

`Group` delivers in any order; a sum is there when all of its members have asked for it, each for
the one that is next in its own order, as collectives of a library go.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.protocol.actions import AllReduce, Send, Usable
from paceline.protocol.collectives import (
    BESIDE,
    SHAPES,
    WEIGHTS,
    Agree,
    AverageMachine,
    Finish,
    HybridMachine,
    LocalStepTaken,
    Made,
    Reduced,
    Remain,
    RingMachine,
    Settle,
    Stretched,
    SumStretch,
    hosts_of,
)

seeds = st.integers(0, 1 << 32)


class Group:
    """Machines of all workers, and what is under way between them."""

    def __init__(self, rng, machines):
        self.rng, self.machines = rng, machines
        self.flight = []
        self.asked = {worker: [] for worker in machines}
        self.usable = {worker: [] for worker in machines}
        self.agreed = {worker: [] for worker in machines}
        self.reduced = []

    def tell(self, worker, event):
        for action in self.machines[worker].handle(event):
            match action:
                case Send(to, message):
                    self.flight.append((int(to.removeprefix("worker")), message))
                case SumStretch(bucket):
                    self.flight.append((worker, Stretched(bucket)))
                case AllReduce():
                    self.asked[worker].append(action)
                    self.match(action.members)
                case Usable():
                    self.usable[worker].append((action.version, action.chunk))
                case Agree():
                    self.agreed[worker].append((action.round, action.late))

    def match(self, members):
        """All of them have asked for something: the library sums it, whatever each meant."""
        while all(self.asked[member] for member in members):
            heads = {member: self.asked[member].pop(0) for member in members}
            assert len({head.members for head in heads.values()}) == 1
            self.reduced.append([head.bucket for head in heads.values()])
            tags = sum(head.tag for head in heads.values())
            count = len(heads)
            self.flight += [(m, Reduced(head.bucket, tags, count)) for m, head in heads.items()]

    def deliver(self):
        worker, what = self.flight.pop(self.next())
        self.tell(worker, what)

    def next(self):
        """Sums come back in their order; messages in any."""
        able = []
        summed = set()
        for index, (worker, what) in enumerate(self.flight):
            if not isinstance(what, Reduced) or worker not in summed:
                able.append(index)
            if isinstance(what, Reduced):
                summed.add(worker)
        return self.rng.choice(able)


def train(group, buckets, steps, finish=0):
    """Every worker makes its buckets in any order and waits for all; the last `finish` of them it
    never makes."""
    unmade = {w: list(range(buckets - finish)) for w in group.machines}
    left = dict.fromkeys(group.machines, steps)
    while True:
        for worker, machine in group.machines.items():
            if left[worker] and not unmade[worker] and machine.step == steps - left[worker] + 1:
                left[worker] -= 1
                unmade[worker] = list(range(buckets - finish)) if left[worker] else []
        moves = [w for w in group.machines if unmade[w]]
        if not moves and not group.flight:
            return left
        if group.flight and (not moves or group.rng.random() < 0.5):
            group.deliver()
        else:
            worker = group.rng.choice(moves)
            bucket = unmade[worker].pop(group.rng.randrange(len(unmade[worker])))
            group.tell(worker, Made(bucket))
            if finish and not unmade[worker]:
                group.tell(worker, Finish())


@settings(max_examples=100, deadline=None)
@given(
    seed=seeds,
    workers=st.integers(1, 4),
    buckets=st.integers(1, 5),
    steps=st.integers(1, 4),
    finish=st.booleans(),
)
def test_a_ring_sums_the_same_bucket_on_all(seed, workers, buckets, steps, finish):
    finish = finish and buckets > 1
    members = range(workers)
    group = Group(random.Random(seed), {w: RingMachine(members, buckets) for w in members})
    assert set(train(group, buckets, steps, finish=int(finish)).values()) == {0}
    assert group.reduced == [[b] * workers for _ in range(steps) for b in range(buckets)]
    for usable in group.usable.values():
        assert usable == [(step + 1, b) for step in range(steps) for b in range(buckets)]


@settings(max_examples=150, deadline=None)
@given(
    seed=seeds,
    hosts=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    buckets=st.integers(1, 4),
    steps=st.integers(1, 3),
)
def test_hybrid_shares_every_bucket_once_a_step(seed, hosts, buckets, steps):
    mates = [[w for w, own in enumerate(hosts) if own == host] for host in dict.fromkeys(hosts)]
    machines = {w: HybridMachine(w, mates, buckets) for w in range(len(hosts))}
    group = Group(random.Random(seed), machines)
    assert set(train(group, buckets, steps).values()) == {0}
    everything = sorted((step + 1, b) for step in range(steps) for b in range(buckets))
    assert all(sorted(usable) == everything for usable in group.usable.values())
    between = len(set(hosts)) > 1
    assert len(group.reduced) == (steps * buckets if between else 0)


class Stuck(Group):
    """One worker does nothing more of one kind from a bucket of a step on."""

    def __init__(self, rng, machines, stuck, kind, step, bucket):
        super().__init__(rng, machines)
        self.stuck, self.kind, self.at = stuck, kind, (step, bucket)

    def tell(self, worker, event):
        is_its = worker == self.stuck and isinstance(event, self.kind)
        if not is_its or (self.machines[worker].step, event.bucket) < self.at:
            super().tell(worker, event)


@settings(max_examples=200, deadline=None)
@given(
    seed=seeds,
    hosts=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    buckets=st.integers(1, 4),
    step=st.integers(0, 2),
    kind=st.sampled_from([Made, Stretched]),
)
def test_mates_wait_for_the_one_that_is_stuck_and_others_for_leaders(
    seed, hosts, buckets, step, kind
):
    rng, mates = random.Random(seed), hosts_of(hosts)
    machines = {w: HybridMachine(w, mates, buckets) for w in range(len(hosts))}
    stuck = rng.randrange(len(hosts))
    train(Stuck(rng, machines, stuck, kind, step, rng.randrange(buckets)), buckets, 3)
    leaders = [host[0] for host in mates]
    for worker, machine in machines.items():
        host = next(host for host in mates if worker in host)
        others = tuple(leader for leader in leaders if leader != worker)
        expected = others if worker == host[0] else (host[0],)
        expected = (stuck,) if stuck in host else expected
        assert machine.missing == expected


def average(seed, workers, every, overlap, steps, settles=(), **beside):
    """Every worker trains when it may and settles after the steps named."""
    machines = {
        w: AverageMachine(tuple(range(workers)), every=every, overlap=overlap, **beside)
        for w in range(workers)
    }
    group, left = Group(random.Random(seed), machines), {}
    for worker in machines:
        left[worker] = [
            e for s in range(1, steps + 1) for e in (LocalStepTaken, *(Settle,) * (s in settles))
        ]
    while True:
        moves = [w for w in machines if left[w] and not machines[w].waits]
        if not moves and not group.flight:
            assert not any(left.values()), "someone waits for ever"
            return group
        if group.flight and (not moves or group.rng.random() < 0.5):
            group.deliver()
        else:
            worker = group.rng.choice(moves)
            group.tell(worker, left[worker].pop(0)())


@settings(max_examples=150, deadline=None)
@given(
    seed=seeds,
    workers=st.integers(1, 4),
    every=st.integers(1, 4),
    overlap=st.booleans(),
    steps=st.integers(1, 9),
    settles=st.sets(st.integers(1, 9)),
    state=st.booleans(),
)
def test_rounds_of_averaging_are_the_same_on_all_and_in_every_run(
    seed, workers, every, overlap, steps, settles, state
):
    group = average(seed, workers, every, overlap, steps, settles, state=state)
    again = average(seed + 1, workers, every, overlap, steps, settles, state=state)
    assert all(len(set(of_all)) == 1 for of_all in group.reduced), "sums are mixed"
    assert group.agreed == again.agreed, "a run does not repeat"
    rounds = {tuple(agreed) for agreed in group.agreed.values()}
    assert len(rounds) == 1
    if not overlap and workers > 1:
        assert len(rounds.pop()) >= steps // every
    for machine in group.machines.values():
        assert machine.agreed or (machine.step not in settles)


def test_a_worker_that_settles_alone_is_told():
    machines = {w: AverageMachine((0, 1), every=4) for w in (0, 1)}
    group = Group(random.Random(0), machines)
    for worker in (0, 1):
        group.tell(worker, LocalStepTaken())
    group.tell(0, Settle())
    assert group.machines[0].waits
    for _ in range(3):
        group.tell(1, LocalStepTaken())
    with pytest.raises(ExchangeError, match="the workers do not average at the same point"):
        group.deliver()


def test_a_late_round_waits_for_its_turn():
    """Overlapped, a sum that is long there is taken when the next round begins."""
    machine = AverageMachine((0, 1), every=2, overlap=True)
    assert machine.handle(LocalStepTaken()) == []
    assert machine.handle(LocalStepTaken()) == [AllReduce(WEIGHTS, (0, 1), 2)]
    assert machine.handle(Reduced(WEIGHTS, 4, 2)) == []
    assert not machine.waits
    assert machine.handle(LocalStepTaken()) == []
    assert machine.handle(LocalStepTaken()) == [Agree(0, late=True), AllReduce(WEIGHTS, (0, 1), 4)]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_goes_beside_the_weights_is_there_before_they_leave(overlap):
    machine = AverageMachine((0, 1), every=1, overlap=overlap, buffers=True, state=True)
    assert machine.handle(LocalStepTaken()) == [AllReduce(SHAPES, (0, 1))]
    assert machine.waits
    told = machine.handle(Reduced(SHAPES, 0, 2))
    assert told == [Usable(SHAPES, 1), AllReduce(BESIDE, (0, 1))]
    assert machine.waits
    told = machine.handle(Reduced(BESIDE, 0, 2))
    assert told == [Usable(BESIDE, 1), AllReduce(WEIGHTS, (0, 1), 1)]
    assert machine.flies == overlap
    assert machine.waits != overlap


def test_a_sum_that_came_to_nothing_is_made_again_by_those_who_are_left():
    machine = AverageMachine((0, 1, 2), every=1, overlap=True, buffers=True)
    machine.handle(LocalStepTaken())
    assert machine.handle(Remain((0, 1), void=True)) == [AllReduce(BESIDE, (0, 1))]
    machine.handle(Reduced(BESIDE, 0, 2))
    assert machine.handle(LocalStepTaken()) == []
    assert machine.waits
    assert machine.handle(Remain((0,), void=True)) == [AllReduce(WEIGHTS, (0,), 1)]
    assert machine.handle(Reduced(WEIGHTS, 1, 1)) == [Agree(0, late=True)]
    assert not machine.waits


def test_a_sum_that_had_ended_counts_those_who_are_lost_since():
    machine = AverageMachine((0, 1, 2), every=1)
    machine.handle(LocalStepTaken())
    assert machine.handle(Remain((0, 1))) == []
    assert machine.handle(Reduced(WEIGHTS, 3, 3)) == [Agree(0)]
    assert machine.handle(LocalStepTaken()) == [AllReduce(WEIGHTS, (0, 1), 2)]


def test_one_alone_sums_only_for_an_outer_optimizer():
    alone = AverageMachine((0,), every=1, buffers=True, state=True)
    assert alone.handle(LocalStepTaken()) == []
    assert not alone.waits
    assert alone.agreed
    outer = AverageMachine((0,), every=1, outer=True)
    assert outer.handle(LocalStepTaken()) == [AllReduce(WEIGHTS, (0,), 1)]
