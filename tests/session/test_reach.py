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
    assert tuple(reach.counts.values()) == (*counted, True)
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
