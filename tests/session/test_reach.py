"""What training does not reach is told: cut off, frozen, not moved, not cleared."""

import pytest
import torch

from paceline.autograd.trained import Trained
from paceline.session.observers.reach import Reach


class Cut(torch.nn.Module):
    """A body and a head, with something between them."""

    def __init__(self, between, *, frozen=False):
        super().__init__()
        self.body = torch.nn.Linear(4, 4, bias=False).requires_grad_(not frozen)
        self.head = torch.nn.Linear(4, 1, bias=False)
        self._between = between

    def forward(self, inputs):
        return self.head(self._between(self.body(inputs)))


@pytest.mark.parametrize(
    ("model", "counted"),
    [
        (Cut(lambda x: x), (20, 0, 0, "")),
        (Cut(lambda x: x.detach()), (20, 0, 16, "body.weight")),
        (Cut(lambda x: x, frozen=True), (20, 16, 0, "body.weight")),
    ],
    ids=["whole", "cut", "frozen"],
)
def test_what_no_gradient_comes_to(model, counted):
    trained = Trained(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    reach = Reach()
    reach.watch(trained)
    for step in range(2):
        assert reach.counts == {}
        model(torch.ones(2, 4)).sum().backward()
        reach.after(step, [trained])
    assert tuple(reach.counts.values())[:5] == (*counted, True)
    assert reach.counts["trained_bytes"] == 4 * (20 - counted[1])
    assert not model.head.weight._post_accumulate_grad_hooks


def test_gradients_that_do_not_come_from_autograd_are_not_counted():
    model = Cut(lambda x: x)
    trained = Trained(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    reach = Reach()
    reach.watch(trained)
    reach.after(0, [trained])
    reach.after(1, [trained])
    assert reach.counts == {}


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_that_are_not_cleared(clears):
    model = Cut(lambda x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained, reach = Trained(model, [optimizer]), Reach()
    reach.watch(trained)
    for step in range(2):
        if clears:
            optimizer.zero_grad()
        for _ in range(2):  # accumulated within a step, as it may be
            model(torch.ones(2, 4)).sum().backward()
        reach.after(step, [trained])
    assert reach.counts["uncleared"] is not clears


@pytest.mark.parametrize(("rate", "moves"), [(0.1, True), (1e-12, False)])
def test_weights_that_do_not_move(rate, moves):
    model = Cut(lambda x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trained, reach = Trained(model, [optimizer]), Reach()
    reach.watch(trained)
    for step in range(60):
        assert "moved" not in reach.counts
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        reach.after(step, [trained])
    assert (reach.counts["moved"] > 1e-5) is moves


def test_weights_whose_gradient_is_zero():
    model = Cut(lambda hidden: torch.relu(hidden - 1e6))
    trained = Trained(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    reach = Reach()
    reach.watch(trained)
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        reach.after(step, [trained])
    assert reach.counts["zero_gradient"] == 20
    assert reach.counts["examples"] == {"zero_gradient": "body.weight"}


def test_weights_that_are_in_no_optimizer():
    model = Cut(lambda hidden: hidden)
    trained = Trained(model, [torch.optim.SGD(model.head.parameters(), lr=0.1)])
    reach = Reach()
    reach.watch(trained)
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        reach.after(step, [trained])
    assert reach.counts["without_optimizer"] == 16
    assert "zero_gradient" not in reach.counts


def test_each_tensor_is_watched_for_moving():
    model = Cut(lambda hidden: hidden)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
    trained = Trained(model, [optimizer])
    reach = Reach()
    reach.watch(trained)
    for step in range(60):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        reach.after(step, [trained])
    moved = reach.counts["moved_by_tensor"]
    assert moved["body.weight"] == 0
    assert moved["head.weight"] > 0


class Gone(torch.Tensor):
    """A stand-in for a gradient that is elsewhere."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was asked for a gradient that is gone")


def test_a_gradient_that_is_elsewhere_is_not_looked_at():
    model = torch.nn.Linear(2, 1)
    with torch._C.DisableTorchFunctionSubclass():
        model.weight.grad = torch.zeros(1, 2).as_subclass(Gone)
    Reach()._note(model.weight)
    with torch._C.DisableTorchFunctionSubclass():
        model.weight.grad = None
