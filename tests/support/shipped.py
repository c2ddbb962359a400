"""Tables in the package that were computed from the built-in models, computed again."""

import torch
from torch import Tensor, nn

from paceline import models
from paceline.compute.profiling import FoundLayer, layers_in_order
from paceline.compute.units import UnitChain, units_of
from paceline.predict.devices import Network, NetworkLayer
from paceline.predict.pipeline_step import ModelUnits

SHAPES = {"tutorial-cnn": (3, 24, 24)}
"""As the papers ran a model, if that is not its usual shape."""


def network_of(model: str) -> Network:
    """A model's layers by operations and bytes: its entry in predict/networks.json."""
    described = models.info(model)
    shape = SHAPES.get(model, described.input_shape)
    with torch.device("meta"):
        built = models.build(model, input_shape=shape)
        layers = count_operations(built, torch.empty(1, *shape))
    return Network(input_shape=shape, layers=tuple(layers))


def count_operations(model: nn.Module, sample: Tensor) -> list[NetworkLayer]:
    """Operations of each layer's forward pass per sample; works on meta tensors, without computing.

    Convolutions and matrix products count two per multiply-add, other layers eight per output.
    """
    counts: list[NetworkLayer] = []
    handles = []
    for layer in layers_in_order(model, sample):

        def counted(_: object, inputs: object, output: Tensor, layer: FoundLayer = layer) -> None:
            operations = 8.0 * output.numel() / sample.shape[0]
            if isinstance(layer.module, nn.Conv2d | nn.Linear):
                weight = layer.module.weight
                operations *= weight.numel() / weight.shape[0] / 4
            counts.append(NetworkLayer(layer.name, operations, layer.parameter_bytes))

        handles.append(layer.module.register_forward_hook(counted))
    try:
        with torch.no_grad():
            model(sample)
    finally:
        for handle in handles:
            handle.remove()
    return counts


def units_of_model(model: str) -> ModelUnits:
    """What passes between a model's units: its entry in predict/units.json."""
    described = models.info(model)
    shape = described.imagenet_shape or described.input_shape
    handed: list[tuple[str, int]] = []
    with torch.device("meta"):
        built = models.build(model, input_shape=shape).eval()
        features = torch.empty(1, *shape, dtype=torch.long if described.tokens else torch.float32)
        for unit in units_of(built):
            features = UnitChain([unit])(features)
            handed.append((unit.name, features.numel()))
    return ModelUnits(input_shape=tuple(shape), units=tuple(handed))
