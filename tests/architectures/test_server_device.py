"""Workers whose tensors are apart from main memory, without a GPU: copies that take their time.

`SlowLane` stands in for a stream: copies happen later, in another thread, and what is copied before
its moment is reached is the wrong value. So whoever forgets to wait trains another curve.
"""

import queue
import random
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from paceline import data, spec
from paceline.architectures.server import streaming_of
from paceline.served import device as devices
from paceline.served.updates import only
from paceline.testing import run_members
from tests.architectures.test_server import clipped, save_and_resume
from tests.support.curves import (
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    largest_difference,
    loss_curve,
    samples,
    small_model,
    whole,
)

TIMEOUT_SECONDS = 100.0


class SlowMoment:
    def __init__(self):
        self._reached = threading.Event()
        self.synchronize, self.query = self._reached.wait, self._reached.is_set
        self.reach, self.forget = self._reached.set, self._reached.clear


class SlowLane:
    """Runs copies in order in a thread of its own, each after a while."""

    def __init__(self, device):
        self._work = queue.SimpleQueue()
        self._chance = random.Random(id(self))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while (act := self._work.get()) is not None:
            if self._chance.random() < 0.3:
                time.sleep(self._chance.random() * 1e-3)
            act()

    def here(self):  # a CPU computes at once
        moment = SlowMoment()
        moment.reach()
        return moment

    def after(self, moment):
        self._work.put(moment.synchronize)

    def copy(self, targets, sources):
        for target, source in zip(targets, sources, strict=True):
            if target.is_floating_point():
                target.fill_(torch.nan)  # whoever looks too early
            self._work.put(partial(torch.Tensor.copy_, target.detach(), source.detach()))

    def reached(self):
        moment = SlowMoment()
        self._work.put(moment.reach)
        return moment

    def follow(self, moment):
        moment.synchronize()

    def reuse(self, moment):
        pass

    def landing(self, elements, dtype):
        return torch.empty(elements, dtype=dtype)

    def close(self):
        self.reached().synchronize()
        self._work.put(None)


def apart(session, function, *arguments):
    """Run a function of the tests on a worker whose weights are apart from main memory."""
    devices.is_apart, devices.open_lane = lambda device: True, SlowLane
    if arguments and arguments[0] is forgetful:
        devices.DeviceWorker.wait = forgetful
        arguments = arguments[1:]
    return function(session, *arguments)


def forgetful(worker, chunks):
    """What a broken worker would do: wait for servers, and not for the copy to the device."""
    worker._moments.clear()
    return devices.WorkerSide.wait(worker, chunks)


def run(function, *arguments, workers, servers=0, text):
    architecture = spec.parse_architecture(f"server:chunk=1KiB,{text}")
    return run_members(
        apart,
        function,
        *arguments,
        workers=workers,
        servers=servers,
        architecture=architecture,
        timeout_seconds=TIMEOUT_SECONDS,
    )


@pytest.fixture(scope="module")
def reference():
    return whole(run_members(loss_curve, workers=1, timeout_seconds=TIMEOUT_SECONDS))


@pytest.mark.parametrize(
    ("text", "workers", "servers"),
    [
        ("placement=dedicated", 1, 1),
        ("placement=dedicated,transport=tcp", 2, 2),
        ("placement=colocated", 2, 0),
        ("placement=colocated,update=worker", 2, 0),
        ("mode=bounded,staleness=0,placement=colocated,transport=tcp", 2, 0),
        ("mode=quorum,quorum=2", 2, 1),
        ("mode=async,placement=colocated", 1, 0),
    ],
)
def test_copies_that_take_their_time_change_nothing(text, workers, servers, reference):
    parts = run(loss_curve, workers=workers, servers=servers, text=text)
    assert largest_difference(whole(parts), reference) < 1e-4


@pytest.mark.parametrize("text", ["placement=colocated", "transport=tcp"])
def test_clipping_and_accumulation(text):
    expected = run_members(clipped, 0.05, 2, workers=1, timeout_seconds=TIMEOUT_SECONDS)[0]
    servers = 0 if "colocated" in text else 1
    for found in run(clipped, 0.05, 2, workers=2, servers=servers, text=text):
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("text", ["placement=colocated", "mode=async,placement=colocated"])
def test_saved_weights_and_state_resume_the_same_curve(text):
    for first, again in run(save_and_resume, workers=1, text=text):
        np.testing.assert_allclose(again, first, rtol=1e-5)


def replayed(session):
    """By hand what recorded passes do: gradients in the same memory, made when they are told of."""
    inputs, targets = samples()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = session.distribute(model, optimizer, gradient_use="nothing")
    weights = [*model.parameters()][::-1]
    memory = [torch.empty_like(weight) for weight in weights]
    moments = [SlowMoment(), SlowMoment()]
    batches, replay, losses = data.GlobalBatches(SAMPLES, GLOBAL_BATCH, seed=1), None, []
    for step in range(STEPS):
        own = batches.indices(step)
        streaming = streaming_of(session.architecture)
        if streaming is not None and replay is None:
            pairs = [*zip(weights, memory, strict=True)]
            replay = streaming.record([(pairs[:3], moments[0]), (pairs[3:], moments[1])])
        loss = nn.functional.cross_entropy(model(inputs[own]), targets[own])
        if replay is None:
            optimizer.zero_grad()
            loss.backward()
        else:
            gradients = torch.autograd.grad(loss, weights)
            for moment in moments:
                moment.forget()
            streaming.replay(replay)
            for place, gradient in zip(memory, gradients, strict=True):
                place.copy_(gradient)
            for moment in moments:
                moment.reach()
        optimizer.step()
        losses.append(loss.item())
    assert replay is not None
    return losses


@pytest.mark.parametrize("text", ["placement=dedicated", "mode=async,placement=colocated"])
def test_recorded_gradients_are_taken_when_they_are_made(text, reference):
    servers = 1 if "dedicated" in text else 0
    (found,) = run(replayed, workers=1, servers=servers, text=text)
    assert largest_difference(np.array(found), reference) < 1e-4


def test_only_a_whole_gradient_with_all_the_weight_is_its_own_mean():
    values = torch.ones(4)
    assert only([([(0, 4, values)], 1.0)], 4) is values
    assert only([([(0, 4, values)], 1.0)], 8) is None
    assert only([([(0, 4, values)], 0.5)], 4) is None
    assert only([([(0, 4, values)], 1.0), ([(0, 4, values)], 1.0)], 4) is None
    assert only([([(0, 2, values[:2]), (2, 4, values[2:])], 1.0)], 4) is None


def test_the_comparison_notices_weights_that_are_read_before_they_are_copied(reference):
    parts = run(loss_curve, forgetful, workers=1, servers=1, text="placement=dedicated")
    assert not largest_difference(whole(parts), reference) < 1e-3
