"""A model filled in part by part has the weights that a plain build gives it."""

import pytest
import torch
from torch import nn

from paceline import models
from paceline.compute.deferred import NotRepeatable, build_deferred
from paceline.compute.units import UnitChain, units_of

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
        row = UnitChain([unit])
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
    assert torch.equal(UnitChain(units_of(model))(inputs), model(inputs))


def test_a_copy_leaves_the_model_without_memory():
    deferred = build_deferred(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    copied = deferred.copy(UnitChain(units_of(deferred.model)), CPU)
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


def started(start) -> nn.Module:
    layer = nn.Linear(6, 5)
    with torch.no_grad():
        start(layer.weight)
    return nn.Sequential(layer, nn.Linear(5, 4))


def hooked(weight):
    weight.requires_grad_().register_hook(lambda gradient: gradient)


def asks_for_memory(weight):
    if not weight.is_meta:
        weight.fill_(2.0)


STARTS = [
    lambda weight: nn.init.orthogonal_(weight),  # looked up when it is called
    lambda weight: nn.init.sparse_(weight, 0.5),
    lambda weight: nn.init.dirac_(weight.view(5, 3, 2)),
    lambda weight: nn.init.trunc_normal_(weight, std=0.2),
    lambda weight: weight[2].fill_(3.0),
]


@pytest.mark.parametrize("start", STARTS)
def test_torchs_ways_to_start_a_weight_are_repeated(start):
    torch.manual_seed(5)
    plain = started(start)
    torch.manual_seed(5)
    deferred = build_deferred(lambda: started(start))
    deferred.check(deferred.model)
    deferred.fill([deferred.model], CPU)
    for made, expected in zip(deferred.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.parametrize(
    "start",
    [
        lambda weight: weight.normal_(generator=torch.Generator().manual_seed(3)),
        lambda weight: weight.mul_(weight.sum().item()),
        lambda weight: weight.copy_(torch.randn_like(weight)),
        lambda weight: torch._foreach_mul_([weight], 2.0),
        hooked,
        asks_for_memory,
        nn.init.orthogonal_,  # as imported beforehand: it asks for memory
    ],
)
def test_other_ways_are_not_repeatable(start):
    def build_and_check() -> None:
        deferred = build_deferred(lambda: started(start))
        deferred.check(deferred.model)

    with pytest.raises(NotRepeatable):
        build_and_check()
