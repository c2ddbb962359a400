"""The state that a joining worker gets: what one end gives the other has, and nothing else."""

from collections import deque

import pytest
import torch

from paceline.collectives.state import give, take
from paceline.errors import SpecError
from paceline.protocol.views import View

VIEW = View(2, participants=(0, 2), hosts=("a", "b"), joined=(2,), first_step=5, source=0)


class Line:
    """A group of which this test is both ends: what was sent to a place is received there."""

    members = (0, 2)

    def __init__(self):
        self.flats = deque()

    def send(self, flat, to, tag):
        assert (to, tag, flat.dtype) == (1, 0, torch.uint8)
        self.flats.append(flat.clone())
        return self

    def receive(self, flat, source, tag):
        assert (source, tag) == (0, 0)
        flat.copy_(self.flats.popleft())
        return self

    def wait(self):
        pass


def through(values, tensors=()):
    line, empty = Line(), [torch.zeros_like(tensor) for tensor in tensors]
    give(line, VIEW, tensors, values)
    found = take(line, VIEW, empty)
    assert not line.flats
    return found, empty


def test_values_arrive_with_their_types():
    tensors = [
        torch.randn(3, 4).t(),
        torch.tensor(7, dtype=torch.int64),
        torch.randn(5).to(torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
    ]
    values = {"text": "a", 3: [1, 2.5, None, True], "nested": {"t": tensors}, "exchanges": 12}
    found, filled = through(values, tensors)
    assert found["exchanges"] == 12
    assert found[3] == [1, 2.5, None, True], "keys that are no text stay what they are"
    for one, other, own in zip(tensors, found["nested"]["t"], filled, strict=True):
        assert one.dtype == other.dtype == own.dtype
        assert torch.equal(one, other)
        assert torch.equal(one, own)


def test_an_optimizer_goes_on_where_the_other_was():
    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()

    first, second = (torch.nn.Linear(3, 1) for _ in range(2))
    one, other = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (first, second))
    train(first, one, 4)
    found, filled = through(one.state_dict(), list(first.parameters()))
    for parameter, value in zip(second.parameters(), filled, strict=True):
        parameter.data.copy_(value)
    other.load_state_dict(found)
    train(first, one, 3)
    train(second, other, 3)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_state_that_cannot_travel_concerns_the_joining_worker_alone():
    with pytest.raises(SpecError, match="the optimizer's state holds a set"):
        through({"state": {1, 2}})
