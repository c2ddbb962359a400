"""A wait that runs out names who is missing, though a collective itself cannot say."""

import dataclasses
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch

from paceline import spec
from paceline.architectures import build
from paceline.architectures.hybrid.host_sums import HostCollective
from paceline.autograd.trained import Trained
from paceline.collectives.group import Group
from paceline.errors import DeadlineError
from paceline.testing import run_members
from tests.support.curves import small_model


def one_stays_away(session, options, away=1):
    """Worker 1 takes part in the first exchange only; what the others say about it."""
    context = dataclasses.replace(session.context(torch.device("cpu"), 0), deadline_seconds=6.0)
    session.store.set(f"here/{session.rank}", "")
    session.store.wait([f"here/{rank}" for rank in range(3)], timedelta(seconds=60))
    architecture = build(options, context)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    architecture.distribute(Trained(model, [optimizer]))
    try:
        for step in range(2):
            if session.rank == away and step == 1:
                session.store.wait(["told/0", "told/2"], timedelta(seconds=60))
                return []
            model(torch.ones(1, 20)).sum().backward()
            optimizer.step()
    except DeadlineError as error:
        session.distribution.error = None  # caught on purpose
        session.store.set(f"told/{session.rank}", "")
        return error.missing
    finally:
        architecture.close(failed=True)
    return []


@pytest.mark.parametrize("options", [spec.Average(), spec.Hybrid()], ids=["average", "hybrid"])
def test_the_worker_that_stays_away_is_named(options):
    found = run_members(one_stays_away, options, workers=3, architecture=options)
    assert found == [["worker1"], [], ["worker1"]]


def one_brings_and_does_not_sum(session, options):
    """Worker 2 is stuck behind its gradients, as one that is suspended while it waits."""

    def be_stuck(sums, *_):
        session.store.wait(["told/0", "told/1"], timedelta(seconds=60))
        raise DeadlineError("nothing", 0.0, [])

    if session.rank == 2:
        HostCollective._sum = be_stuck
    return one_stays_away(session, options, away=None)


def test_who_is_stuck_behind_its_gradients_is_named_alone():
    options = spec.Hybrid()
    found = run_members(one_brings_and_does_not_sum, options, workers=3, architecture=options)
    assert found == [["worker2"], ["worker2"], []]


def sums_of_two_groups(session):
    """Two groups of the same workers in one part of the store, and a third of some of them."""
    context = session.context(torch.device("cpu"), 7)
    sums = []
    for members in (None, [0, 1, 2], [0, 2]):
        if members is not None and session.rank not in members:
            continue
        flat = torch.tensor([float(session.rank + 1)])
        Group(context, "gloo", members).all_reduce(flat).wait()
        sums.append(flat.item())
    return sums


def test_groups_of_the_same_workers_do_not_meet_each_other():
    found = run_members(sums_of_two_groups, workers=3)
    assert found == [[6.0, 6.0, 4.0], [6.0, 6.0], [6.0, 6.0, 4.0]]


def drop_while_summing(session):
    """Tensors that a script lets go of at once, and in which thread each was freed."""
    group = Group(session.context(torch.device("cpu"), 7), "gloo")
    freed, numbers = [], []
    for _ in range(40):
        flat = torch.ones(50_000)
        numbers.append(weakref.ref(flat, lambda _: freed.append(threading.get_ident())))
        operation = group.all_reduce(flat)
        del flat
        operation.wait()
        del operation
        time.sleep(0.01)
    return [thread == threading.get_ident() for thread in freed]


def test_no_thread_of_gloos_frees_what_python_knows():
    """It would need the interpreter's lock, and abort the process when the interpreter ends."""
    for freed in run_members(drop_while_summing, workers=2):
        assert len(freed) >= 10
        assert all(freed)
