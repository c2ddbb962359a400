"""P2's fully connected networks: sigmoid layers, then one logit per class."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from paceline.models.layers import fill_bias
from paceline.settings import setting

ADULT = (200, 100)
ACOUSTIC = (200, 100)
MNIST = (200, 100)
CIFAR10 = (200, 100)
HIGGS = (1024,)


class Dense(nn.Module):
    """input - hidden widths - classes, for example 784-200-100-10."""

    def __init__(
        self, *, input_shape: tuple[int, ...], num_classes: int, hidden: tuple[int, ...]
    ) -> None:
        super().__init__()
        widths = (math.prod(input_shape), *hidden)
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.Sigmoid()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))
        for module in self.layers:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                fill_bias(module, 0.0)

    def forward(self, samples: Tensor) -> Tensor:
        logits: Tensor = self.layers(torch.flatten(samples, 1))
        return logits

    def units(self) -> list[tuple[str, nn.Module]]:
        """See `models.units`."""
        return [("", nn.Flatten(1)), ("layers", self.layers)]


def adjustable(*, input_shape: tuple[int, ...], num_classes: int) -> Dense:
    """Return P2's network with two hidden layers whose width is the setting `hidden`.

    The second layer has half the width, as in the paper's 200 and 100.
    """
    width = setting("hidden", MNIST[0])
    return Dense(
        input_shape=input_shape, num_classes=num_classes, hidden=(width, max(1, width // 2))
    )
