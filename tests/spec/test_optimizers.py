"""The table of optimizers, compared with what the optimizers do."""

import typing

import msgspec
import pytest
import torch

from paceline import spec
from paceline.builtin import optimizers
from paceline.served.updates import is_elementwise_state, server_class

OFFERED = typing.get_args(
    next(f.type for f in msgspec.structs.fields(spec.Optimizer) if f.name == "name")
)


def trained(optimizer, weights):
    for _ in range(2):
        optimizer.zero_grad()
        weights.pow(4).sum().backward()  # no gradient is in proportion to its weights
        optimizer.step()


def elements_kept(optimizer, weights):
    """Numbers of the optimizer's state for each weight, found by looking."""
    state = optimizer.state[weights]
    return sum(is_elementwise_state(name, value, weights.numel()) for name, value in state.items())


def test_the_loop_offers_only_optimizers_of_the_table():
    assert set(OFFERED) <= set(spec.OPTIMIZERS)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", OFFERED)
def test_the_state_of_an_offered_optimizer_is_as_large_as_the_table_says(name, momentum):
    if momentum and not spec.OPTIMIZERS[name].takes_momentum:
        pytest.skip("it takes no momentum")
    options = spec.Optimizer(name=name, momentum=momentum)
    weights = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = optimizers.build(options, [weights])
    trained(optimizer, weights)
    assert elements_kept(optimizer, weights) == options.state_numbers


@pytest.mark.parametrize("name", sorted(set(spec.OPTIMIZERS) - set(OFFERED)))
def test_the_state_of_a_scripts_optimizer_is_as_large_as_the_table_says(name):
    facts = spec.OPTIMIZERS[name]
    weights = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = optimizers.class_of(facts)([weights], lr=0.01)
    trained(optimizer, weights)
    assert elements_kept(optimizer, weights) == facts.state_numbers
    assert server_class(optimizer) == facts.class_name


@pytest.mark.parametrize("name", sorted(spec.OPTIMIZERS))
def test_an_optimizer_is_elementwise_when_a_part_alone_moves_as_it_does_in_the_whole(name):
    facts = spec.OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(6, 4, generator=generator)
    whole, part = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start[:2].clone())
    for weights in (whole, part):
        trained(optimizers.class_of(facts)([weights], lr=0.1), weights)
    assert torch.allclose(whole[:2], part, rtol=0, atol=2e-6) == facts.is_elementwise
    assert (facts.class_name == server_class(optimizers.class_of(facts)([part], lr=0.01))) == (
        facts.is_elementwise
    )
