"""Layers of a model: found in order, counted by operations, timed so that the parts sum up."""

import pytest
import torch

from paceline import models
from paceline.compute import profiling
from tests.support.shipped import count_operations

FORWARD_GIGA_OPERATIONS = {"alexnet": 1.43, "vgg16": 31.0, "resnet50": 8.2, "resnet152": 23.1}
"""Two per multiply-add, as everybody counts them; normalisation adds a little."""


@pytest.mark.parametrize("name", FORWARD_GIGA_OPERATIONS)
def test_operations_are_the_known_ones(name):
    described = models.info(name)
    with torch.device("meta"):
        found = count_operations(models.build(name), torch.empty(1, *described.input_shape))
    giga = sum(layer.operations for layer in found) / 1e9
    assert giga == pytest.approx(FORWARD_GIGA_OPERATIONS[name], rel=0.03)


@pytest.mark.parametrize("name", ["tutorial-cnn", "gpt-small"])
def test_layers_hold_every_parameter_once(name):
    described, model = models.info(name), models.build(name)
    sample = torch.zeros(2, *described.input_shape, dtype=torch.long if described.tokens else None)
    layers = profiling.layers_in_order(model, sample)
    assert sum(layer.parameter_bytes for layer in layers) == sum(
        4 * p.numel() for p in model.parameters()
    )


def test_layers_come_in_the_order_of_the_forward_pass():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    layers = profiling.measure_layers(
        model, torch.randn(8, 4), torch.zeros(8, dtype=torch.long), warmup=1, repeats=3
    )
    assert [layer.name for layer in layers] == ["0", "2"]
    assert all(layer.forward_seconds > 0 and layer.backward_seconds > 0 for layer in layers)
    assert not [handle for module in model.modules() for handle in module._forward_pre_hooks]


def test_a_profile_sums_to_the_whole_step(monkeypatch):
    monkeypatch.setattr(profiling, "measure_step", lambda *_, **__: 0.5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    found = profiling.profile(model, (4,), batch=8, num_classes=2, repeats=2)
    total = sum(layer.forward_seconds + layer.backward_seconds for layer in found.layers)
    assert total == pytest.approx(0.5)
    # Eight and two samples took as long: all of it is overhead.
    assert found.overhead_seconds == pytest.approx(0.5)
