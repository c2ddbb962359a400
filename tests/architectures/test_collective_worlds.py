"""`ring`, `hybrid` and `average` in real processes decide what they decide on the test network."""

import random

import msgspec
import pytest

from paceline import spec
from paceline.architectures import hybrid
from paceline.autograd import buckets
from paceline.protocol.actions import AllReduce, Usable
from paceline.protocol.collectives import (
    Agree,
    AverageMachine,
    HybridMachine,
    LocalStepTaken,
    RingMachine,
    Settle,
    SumStretch,
)
from paceline.testing import run_members
from tests.protocol.test_collectives import Group, train
from tests.support.curves import STEPS, loss_curve

BUCKET_BYTES = 64
"""The small model has several of these."""


def decisions(session, kind, hosts):
    """What this worker's machines decided, in order, but for how it is told to others."""
    machine = {"ring": RingMachine, "hybrid": HybridMachine, "average": AverageMachine}[kind]
    decided, really = [], machine.handle

    def handle(self, event):
        actions = really(self, event)
        decided.extend(said(action) for action in actions if said(action))
        return actions

    machine.handle = handle
    buckets.FIRST_BUCKET_BYTES = hybrid.BUCKET_BYTES = BUCKET_BYTES
    session.identity = msgspec.structs.replace(session.identity, host=hosts[session.rank])
    loss_curve(session)
    return decided


def said(action):
    match action:
        case AllReduce(bucket, members, tag):
            return "sum", bucket, members, tag
        case SumStretch(bucket, place, places):
            return "stretch", bucket, place, places
        case Usable(bucket, version):
            return "usable", bucket, version
        case Agree(round_, late):
            return "agree", round_, late
    return None


class Noting(Group):
    """The test network, and what each machine decided."""

    def __init__(self, machines):
        super().__init__(random.Random(5), machines)
        self.decided = {worker: [] for worker in machines}
        for worker, machine in machines.items():
            machine.handle = self.noting(worker, machine.handle)

    def noting(self, worker, really):
        def handle(event):
            actions = really(event)
            self.decided[worker] += [said(action) for action in actions if said(action)]
            return actions

        return handle


def by_kind(decided):
    """Each kind in its order; when what was summed comes back is chance, but for its step."""
    kinds = {kind: [one for one in decided if one[0] == kind] for kind, *_ in decided}
    kinds["usable"].sort(key=lambda usable: (usable[2], usable[1]))
    return kinds


@pytest.mark.parametrize(
    ("kind", "hosts"), [("ring", "aa"), ("hybrid", "aa"), ("hybrid", "ab"), ("hybrid", "aab")]
)
def test_buckets_are_summed_as_on_the_test_network(kind, hosts):
    options = spec.Ring(bucket=f"{BUCKET_BYTES}B") if kind == "ring" else spec.Hybrid()
    real = run_members(decisions, kind, hosts, workers=len(hosts), architecture=options)
    count = 1 + max(one[1] for one in real[0])
    assert count > 2
    members = range(len(hosts))
    mates = [[w for w in members if hosts[w] == host] for host in sorted(set(hosts))]
    machines = {
        w: RingMachine(members, count) if kind == "ring" else HybridMachine(w, mates, count)
        for w in members
    }
    network = Noting(machines)
    train(network, count, STEPS)
    for worker in members:
        assert by_kind(real[worker]) == by_kind(network.decided[worker])


@pytest.mark.parametrize(
    ("every", "overlap", "state"),
    [(1, False, False), (4, False, True), (4, True, False), (4, True, True)],
)
def test_rounds_are_those_of_the_test_network(every, overlap, state):
    options = spec.Average(every=every, overlap=overlap, state=state)
    real = run_members(decisions, "average", "aa", workers=2, architecture=options)
    machines = {
        w: AverageMachine((0, 1), every=every, overlap=overlap, state=state) for w in (0, 1)
    }
    network = Noting(machines)
    for event in (*(LocalStepTaken() for _ in range(STEPS)), Settle()):
        for worker in machines:
            network.tell(worker, event)
        while network.flight:
            network.deliver()
    for worker in machines:
        assert real[worker] == network.decided[worker]
