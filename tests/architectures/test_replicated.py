"""`replicated` trains like one device on the whole batch, however the batch is split."""

import pytest
import torch
from torch import nn

from paceline import spec
from paceline.architectures import replicated
from paceline.errors import MemberError, SpecError
from paceline.record import RunFolder
from paceline.session.session import Session
from paceline.testing import run_members
from tests.support.curves import largest_difference, loss_curve, whole


@pytest.fixture(scope="module")
def reference():
    return whole(run_members(loss_curve, workers=1))


@pytest.mark.parametrize("options", ["devices=2", "devices=3", "devices=2,shares=3/1"])
def test_follows_single(options, reference):
    chosen = spec.parse_architecture(f"replicated:{options}")
    curve = whole(run_members(loss_curve, workers=1, architecture=chosen))
    assert largest_difference(curve, reference) < 1e-4


def train_without_a_replica(session: Session) -> list[float]:
    """What a broken combination would do: the last replica's gradients are dropped."""
    added = replicated._added
    replicated._added = lambda parts, device: added(parts[:-1], device)
    return loss_curve(session)


def test_the_comparison_notices_a_dropped_replica(reference):
    two = spec.Replicated(devices=2)
    curve = whole(run_members(train_without_a_replica, workers=1, architecture=two))
    assert largest_difference(curve, reference) > 1e-3


class Recording(nn.Module):
    """Says in which thread each part was computed, and how large it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.seen: list[int] = []

    def forward(self, inputs, *, scale=1.0):
        return {"logits": self.norm(self.layer(inputs)) * scale, "copy": inputs * 2}


def step_a_recording_model(session: Session) -> dict[str, object]:
    torch.manual_seed(0)
    model = Recording()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = session.distribute(model, optimizer)
    inputs = torch.randn(10, 4)
    found = model(inputs, scale=3.0)
    found["logits"].square().sum().backward()
    statistics = model.norm.running_mean.clone()
    with torch.no_grad():
        half = model.layer(inputs[:5])
    expected = 0.1 * half.mean(dim=0)  # the first replica's part
    optimizer.step()
    model.layer.weight.requires_grad_(False)  # frozen from here on
    model.zero_grad()
    model(inputs)["logits"].sum().backward()
    model.eval()
    alone = model(inputs)["logits"].shape
    return {
        "keys": sorted(found),
        "copy": bool((found["copy"] == inputs * 2).all()),
        "statistics": bool(torch.allclose(statistics, expected, atol=1e-6)),
        "frozen": model.layer.weight.grad is None and model.layer.bias.grad is not None,
        "alone": tuple(alone),
        "state": sorted(model.state_dict())[:2],
    }


def test_what_a_script_may_do_with_its_model():
    (found,) = run_members(
        step_a_recording_model, workers=1, architecture=spec.Replicated(devices=2)
    )
    assert found == {
        "keys": ["copy", "logits"],
        "copy": True,
        "statistics": True,
        "frozen": True,
        "alone": (10, 3),
        "state": ["layer.bias", "layer.weight"],
    }


def return_a_number(session: Session) -> None:
    class Summing(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).sum()

    model = Summing(4, 3)
    model, _ = session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(8, 4))


def test_a_model_that_adds_up_its_batch_is_refused():
    with pytest.raises(MemberError, match="one row for each sample"):
        run_members(return_a_number, workers=1, architecture=spec.Replicated(devices=2))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("replicated:shares=3/x", "no weights"), ("replicated:devices=-1", "negative")],
)
def test_bad_options(text, complaint):
    with pytest.raises(SpecError, match=complaint):
        spec.parse_architecture(text)


def test_several_workers_are_refused():
    with pytest.raises(SpecError, match="replicated:devices=4"):
        spec.replace(spec.Experiment(), architecture=spec.Replicated(), workers=4)


class Unused(nn.Module):
    """Its first parameter has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.layer = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))

    def forward(self, inputs):
        return self.layer(inputs)


def step_with_an_unused_parameter(session: Session) -> tuple[bool, bool]:
    model = Unused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.distribute(model, optimizer)
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    return model.unused.grad is None, model.layer[0].weight.grad is not None


def test_a_parameter_without_a_gradient_stays_without_and_dropout_is_noted(tmp_path):
    two = spec.Replicated(devices=2)
    folder = RunFolder.create(tmp_path / "run", spec.Experiment(architecture=two))
    found = run_members(step_with_an_unused_parameter, workers=1, architecture=two, folder=folder)
    assert found == [(True, True)]
    notes = [event.text for event in folder.events() if event.kind == "note"]
    assert any("layer.1: what they do to a sample depends on" in text for text in notes), notes
