"""`inception3`: Inception v3 with factorised convolutions, without the auxiliary head.

Its own pictures are 299x299. The original pads none of its strided layers, which leaves nothing of
a picture under 75 pixels; smaller ones are padded there, with the same parameters.
"""

import torch
from torch import Tensor, nn

from paceline.models.layers import FeaturesThenClassifier, PointConv2d

EPSILON = 0.001
SMALLEST_UNPADDED = 75


def unit(
    channels_in: int,
    channels_out: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    padded: bool = True,
) -> nn.Sequential:
    """Convolution, batch norm, ReLU; `padded` keeps the size (over the stride)."""
    down, across = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (down // 2, across // 2) if padded else 0
    kind = PointConv2d if down == across == 1 else nn.Conv2d
    return nn.Sequential(
        kind(channels_in, channels_out, (down, across), stride, padding, bias=False),
        nn.BatchNorm2d(channels_out, eps=EPSILON),
        nn.ReLU(inplace=True),
    )


def pooled(channels_in: int, channels_out: int) -> nn.Sequential:
    """The mean of each neighbourhood, then a 1x1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), unit(channels_in, channels_out, 1))


class Side(nn.Module):
    """Branches over one input, their outputs side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([branch(features) for branch in self.branches], dim=1)


def at_35(channels: int, pool: int) -> Side:
    return Side(
        unit(channels, 64, 1),
        nn.Sequential(unit(channels, 48, 1), unit(48, 64, 5)),
        nn.Sequential(unit(channels, 64, 1), unit(64, 96, 3), unit(96, 96, 3)),
        pooled(channels, pool),
    )


def to_17(padded: bool) -> Side:
    return Side(
        unit(288, 384, 3, stride=2, padded=padded),
        nn.Sequential(unit(288, 64, 1), unit(64, 96, 3), unit(96, 96, 3, stride=2, padded=padded)),
        nn.MaxPool2d(3, stride=2, padding=int(padded)),
    )


def at_17(width: int) -> Side:
    flat, tall = (1, 7), (7, 1)
    return Side(
        unit(768, 192, 1),
        nn.Sequential(unit(768, width, 1), unit(width, width, flat), unit(width, 192, tall)),
        nn.Sequential(
            unit(768, width, 1),
            unit(width, width, tall),
            unit(width, width, flat),
            unit(width, width, tall),
            unit(width, 192, flat),
        ),
        pooled(768, 192),
    )


def to_8(padded: bool) -> Side:
    return Side(
        nn.Sequential(unit(768, 192, 1), unit(192, 320, 3, stride=2, padded=padded)),
        nn.Sequential(
            unit(768, 192, 1),
            unit(192, 192, (1, 7)),
            unit(192, 192, (7, 1)),
            unit(192, 192, 3, stride=2, padded=padded),
        ),
        nn.MaxPool2d(3, stride=2, padding=int(padded)),
    )


def at_8(channels: int) -> Side:
    def both() -> Side:
        return Side(unit(384, 384, (1, 3)), unit(384, 384, (3, 1)))

    return Side(
        unit(channels, 320, 1),
        nn.Sequential(unit(channels, 384, 1), both()),
        nn.Sequential(unit(channels, 448, 1), unit(448, 384, 3), both()),
        pooled(channels, 192),
    )


class Inception3(FeaturesThenClassifier):
    """Dropout is off unless asked for: see AlexNet."""

    def __init__(
        self, *, input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        padded = min(input_shape[1:]) < SMALLEST_UNPADDED
        self.features = nn.Sequential(
            unit(input_shape[0], 32, 3, stride=2, padded=padded),
            unit(32, 32, 3, padded=padded),
            unit(32, 64, 3),
            nn.MaxPool2d(3, stride=2, padding=int(padded)),
            unit(64, 80, 1),
            unit(80, 192, 3, padded=padded),
            nn.MaxPool2d(3, stride=2, padding=int(padded)),
            at_35(192, 32),
            at_35(256, 64),
            at_35(288, 64),
            to_17(padded),
            *(at_17(width) for width in (128, 160, 160, 192)),
            to_8(padded),
            at_8(1280),
            at_8(2048),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(2048, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, mean=0.0, std=0.1, a=-2, b=2)
