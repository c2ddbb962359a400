"""A loss or a gradient that is no number is told, with the member and the step it began with."""

import math

import pytest
import torch
from torch import nn

from paceline import spec
from paceline.builtin.recording import has_hooks
from paceline.launch import identify
from paceline.record import RunFolder
from paceline.record.entries import NOT_FINITE
from paceline.session.observers.nonfinite import NonfiniteValues
from paceline.session.session import Session
from paceline.testing import run_members


def look(gradient, loss=1.0, numbers=None, step=3):
    numbers = numbers or NonfiniteValues()
    weight = nn.Parameter(torch.ones(3))
    numbers.watch([weight])
    (weight * torch.tensor(gradient)).sum().backward()
    return numbers.complaint("worker1", step, loss, numbers.take())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_told(bad):
    assert look([1.0, 2.0, 3.0]) == ""
    told = look([1.0, bad, 3.0])
    assert told == "a gradient of worker1 is not finite at step 3; from there on nothing is learnt."
    assert look([1.0, bad, -bad])


def test_a_loss_that_is_not_finite_is_told_and_only_once():
    numbers = NonfiniteValues()
    told = look([1.0, 1.0, 1.0], float("nan"), numbers, step=7)
    assert "the loss of worker1 is nan at step 7" in told
    assert look([1.0, 1.0, 1.0], float("nan"), numbers, step=8) == ""


def test_nothing_is_told_where_nothing_is_known():
    assert NonfiniteValues().complaint("worker0", 0, None, None) == ""
    numbers = NonfiniteValues()
    numbers.watch([torch.ones(3, requires_grad=True)])  # no parameter
    assert numbers.take() is None


def train(session):
    """Worker 1's gradient is infinite in step 4, though its loss is not."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.distribute(model, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        if step == 4 and session.rank == 1:
            loss = loss + (model.weight - model.weight.detach()).abs().sqrt().sum()
        loss.backward()
        session.report_loss(loss)
        optimizer.step()


def test_the_first_to_go_wrong_is_named_in_the_record(tmp_path):
    experiment = spec.replace(spec.Experiment(), workers=2, architecture=spec.Ring())
    folder = RunFolder.create(tmp_path / "run", experiment)
    run_members(train, workers=2, architecture=spec.Ring(), folder=folder)
    told = {event.step: event.text for event in folder.events() if event.kind == NOT_FINITE}
    assert "a gradient of worker1 is not finite at step 4" in told[4]
    assert min(told) == 4


def test_what_looks_for_wrong_numbers_does_not_keep_passes_from_being_recorded(tmp_path):
    experiment = spec.Experiment()
    folder = RunFolder.create(tmp_path / "run", experiment)
    session = Session(
        identify({}), options=spec.Single(), folder=folder, measurement=experiment.measurement
    )
    model = torch.nn.Linear(3, 2)
    try:
        session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert model.weight._backward_hooks  # it is looked at
        assert not has_hooks(model, session)
        session.gradients.scale_by(0.5)
        assert has_hooks(model, session)
    finally:
        session.close()


def test_gradients_of_no_step_are_not_looked_at():
    numbers = NonfiniteValues()
    with numbers.paused():
        assert look([math.nan, 1.0, 1.0], numbers=numbers) == ""
    assert look([math.nan, 1.0, 1.0], numbers=numbers) != ""
