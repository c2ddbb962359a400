"""`inception3`: Inception v3 without the auxiliary head, 23,834,568 parameters.

Convolutions are padded to keep a picture's size, where the original's first ones are not; the
parameters are the same, and small pictures go through it as well.
"""

import torch
from torch import Tensor, nn

from paceline.models.layers import PointConv2d

EPSILON = 0.001
"""The original's batch-norm epsilon."""


class Unit(nn.Sequential):
    """Convolution, batch norm, ReLU; kernels may be oblong."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int | tuple[int, int], stride: int = 1
    ) -> None:
        height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        kind = PointConv2d if height == width == 1 else nn.Conv2d
        padding = (height // 2, width // 2)
        super().__init__(
            kind(channels_in, channels_out, (height, width), stride, padding, bias=False),
            nn.BatchNorm2d(channels_out, eps=EPSILON),
            nn.ReLU(inplace=True),
        )


class Branches(nn.Module):
    """Several views of one input, side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([branch(features) for branch in self.branches], dim=1)


def pooled(channels: int, width: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Unit(channels, width, 1))


def block_a(channels: int, pool_width: int) -> nn.Module:
    """At 35x35: 1x1, 5x5, two 3x3."""
    return Branches(
        Unit(channels, 64, 1),
        nn.Sequential(Unit(channels, 48, 1), Unit(48, 64, 5)),
        nn.Sequential(Unit(channels, 64, 1), Unit(64, 96, 3), Unit(96, 96, 3)),
        pooled(channels, pool_width),
    )


def reduce_to_17(channels: int) -> nn.Module:
    return Branches(
        Unit(channels, 384, 3, stride=2),
        nn.Sequential(Unit(channels, 64, 1), Unit(64, 96, 3), Unit(96, 96, 3, stride=2)),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def block_c(width: int) -> nn.Module:
    """At 17x17: 7x7 kernels as 1x7 and 7x1."""
    return Branches(
        Unit(768, 192, 1),
        nn.Sequential(Unit(768, width, 1), Unit(width, width, (1, 7)), Unit(width, 192, (7, 1))),
        nn.Sequential(
            Unit(768, width, 1),
            Unit(width, width, (7, 1)),
            Unit(width, width, (1, 7)),
            Unit(width, width, (7, 1)),
            Unit(width, 192, (1, 7)),
        ),
        pooled(768, 192),
    )


def reduce_to_8() -> nn.Module:
    return Branches(
        nn.Sequential(Unit(768, 192, 1), Unit(192, 320, 3, stride=2)),
        nn.Sequential(
            Unit(768, 192, 1),
            Unit(192, 192, (1, 7)),
            Unit(192, 192, (7, 1)),
            Unit(192, 192, 3, stride=2),
        ),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def block_e(channels: int) -> nn.Module:
    """At 8x8: branches that fork again."""
    return Branches(
        Unit(channels, 320, 1),
        nn.Sequential(
            Unit(channels, 384, 1), Branches(Unit(384, 384, (1, 3)), Unit(384, 384, (3, 1)))
        ),
        nn.Sequential(
            Unit(channels, 448, 1),
            Unit(448, 384, 3),
            Branches(Unit(384, 384, (1, 3)), Unit(384, 384, (3, 1))),
        ),
        pooled(channels, 192),
    )


class Inception3(nn.Module):
    """Dropout is off unless asked for: see AlexNet."""

    def __init__(
        self, *, input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            Unit(input_shape[0], 32, 3, stride=2),
            Unit(32, 32, 3),
            Unit(32, 64, 3),
            nn.MaxPool2d(3, stride=2, padding=1),
            Unit(64, 80, 1),
            Unit(80, 192, 3),
            nn.MaxPool2d(3, stride=2, padding=1),
            block_a(192, 32),
            block_a(256, 64),
            block_a(288, 64),
            reduce_to_17(288),
            block_c(128),
            block_c(160),
            block_c(160),
            block_c(192),
            reduce_to_8(),
            block_e(1280),
            block_e(2048),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(2048, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, mean=0.0, std=0.1, a=-2, b=2)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return logits
