"""A script that reports no loss: what it calls backward() on is its loss, and nothing breaks."""

import pytest
import torch
from torch import nn

from paceline import spec
from paceline.launch import identify
from paceline.record import RunFolder
from paceline.record.entries import IN_EVALUATION
from paceline.session.session import Session

BACKWARD = torch.autograd.backward


class Script:
    """One worker's session of a recorded script."""

    def __init__(self, path):
        asked = spec.Experiment(workload=spec.Workload(script=spec.Script(path="train.py")))
        self.folder = RunFolder.create(path, asked)
        self.session = Session(
            identify({}), options=spec.Single(), folder=self.folder, measurement=asked.measurement
        )

    def losses(self):
        self.session.close()
        return [step.loss for step in self.folder.steps("worker0")]

    def model(self, kind=torch.optim.SGD, **options):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        return self.session.distribute(model, kind(model.parameters(), lr=0.0, **options))


@pytest.fixture
def script(tmp_path):
    found = Script(tmp_path / "run")
    yield found
    found.session.close()
    assert torch.autograd.backward is BACKWARD


def loss_of(model, value):
    return model(torch.full((1, 1), value)).sum()


def test_one_pass_a_step(script):
    model, optimizer = script.model()
    for value in (3.0, 2.0):
        loss_of(model, value).backward()
        optimizer.step()
    assert script.losses() == [3.0, 2.0]
    counted = script.folder.members()[0].counters["script"]
    assert counted["losses_seen"] == 2


def test_what_is_reported_wins(script):
    model, optimizer = script.model()
    loss_of(model, 3.0).backward()
    script.session.report_loss(7.0)
    optimizer.step()
    assert script.losses() == [7.0]


def test_accumulated_passes(script):
    """Divided, they add up; whole, their mean is the loss."""
    model, optimizer = script.model()
    for value in (2.0, 4.0):
        (loss_of(model, value) / 2).backward()
    optimizer.step()
    for value in (2.0, 4.0):
        loss_of(model, value).backward()
    optimizer.step()
    assert script.losses() == [3.0, 3.0]


def test_a_gradient_scaler(script):
    model, optimizer = script.model()
    scale = torch.full((), 65536.0)
    (loss_of(model, 3.0) * scale).backward()
    optimizer.step()
    for value in (2.0, 4.0):
        (loss_of(model, value) / 2 * scale).backward()
    optimizer.step()
    assert script.losses() == [3.0, 3.0]


def test_a_closure(script):
    model, optimizer = script.model(torch.optim.LBFGS, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 3.0)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert script.losses() == [3.0]


def test_a_loss_that_is_changed_afterwards(script):
    model, optimizer = script.model()
    loss = loss_of(model, 3.0)
    loss.backward()
    with torch.no_grad():
        loss.add_(100.0)
    optimizer.step()
    assert script.losses() == [3.0]


def test_losses_that_take_turns_are_nobodys(script):
    """A generator and a discriminator: no one value says whether both learn."""
    model = nn.ModuleDict({"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)})
    one, two = (torch.optim.SGD(model[name].parameters(), lr=0.0) for name in ("one", "two"))
    model, one, two = script.session.distribute(model, one, two)
    for name, optimizer in (("one", one), ("two", two)):
        model[name](torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert script.losses() == [None]


def test_gradients_without_a_loss(script):
    model, optimizer = script.model()
    output = model(torch.ones(2, 1))
    output.backward(torch.ones(2, 1))
    optimizer.step()
    loss = loss_of(model, 3.0)
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()
    assert script.losses() == [None, None]


def test_a_built_in_workload_reports_its_own(tmp_path):
    folder = RunFolder.create(tmp_path / "run", spec.Experiment())
    session = Session(
        identify({}), options=spec.Single(), folder=folder, measurement=spec.Measurement()
    )
    model = nn.Linear(1, 1)
    session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert torch.autograd.backward is BACKWARD
    session.close()


def test_a_model_that_is_trained_in_evaluation_mode(script):
    """`model.train()` was forgotten after an evaluation: its passes are training all the same."""
    model, optimizer = script.model()
    for step in range(6):
        if step == 2:
            model.eval()
        loss_of(model, 3.0).backward()
        optimizer.step()
        if step == 1:
            with torch.no_grad():
                model.eval()(torch.ones(4, 1))
            model.train()
    assert script.losses() == [3.0] * 6
    steps = script.folder.steps("worker0")
    assert [step.samples for step in steps] == [1] * 6
    assert [bool(step.paused_seconds) for step in steps[3:]] == [False] * 3
    (told,) = [event for event in script.folder.events() if event.kind == IN_EVALUATION]
    assert told.step == 2
