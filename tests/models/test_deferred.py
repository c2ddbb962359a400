"""A model filled in part by part has the weights that a plain build gives it."""

import pytest
import torch
from torch import nn

from paceline import models
from paceline.models.deferred import NotRepeatable, build_deferred
from paceline.models.units import Row, units_of

CPU = torch.device("cpu")
NAMES = ["tutorial-cnn", "mnist-dnn", "cifar10-cnn", "googlenet", "resnet50", "gpt-small"]


def build(name: str) -> nn.Module:
    entry = models.info(name)
    shape = (3, 32, 32) if entry.imagenet_shape else entry.input_shape
    torch.manual_seed(5)
    return models.build(name, input_shape=shape)


@pytest.mark.parametrize("name", NAMES)
def test_every_unit_by_itself_is_part_of_the_plain_model(name):
    plain = build(name)
    drawn = torch.rand(1)
    deferred = build_deferred(lambda: build(name))
    assert torch.rand(1) == drawn  # the generator has moved on as far
    for unit in reversed(units_of(deferred.model)):  # in any order
        row = Row([unit])
        deferred.check(row)
        deferred.fill([row], CPU)
    filled, expected = deferred.model.state_dict(), plain.state_dict()
    assert filled.keys() == expected.keys()
    assert all(torch.equal(filled[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_row_computes_what_the_model_does(name):
    model = build(name)
    entry = models.info(name)
    shape = (3, 32, 32) if entry.imagenet_shape else entry.input_shape
    inputs = torch.randint(200, (2, *shape)) if entry.tokens else torch.randn(2, *shape)
    assert torch.equal(Row(units_of(model))(inputs), model(inputs))


def test_a_copy_leaves_the_model_without_memory():
    deferred = build_deferred(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    copied = deferred.copy(Row(units_of(deferred.model)), CPU)
    assert copied(torch.ones(2, 4)).shape == (2, 3)
    assert all(parameter.is_meta for parameter in deferred.model.parameters())


class Copied(nn.Module):
    """Its second weight is the first one's double, which nobody knows without the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3))
        self.second = nn.Parameter(self.first.detach() * 2)


def test_what_cannot_be_repeated_is_said():
    deferred = build_deferred(Copied)
    with pytest.raises(NotRepeatable):
        deferred.check(deferred.model)
