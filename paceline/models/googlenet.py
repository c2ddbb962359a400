"""`googlenet`: nine inception modules with batch norm, without the auxiliary heads.

Global pooling takes pictures of any size from 32x32 on.
"""

import torch
from torch import Tensor, nn

from paceline.models.layers import FeaturesThenClassifier, conv_norm

EPSILON = 0.001
"""The original's batch-norm epsilon."""

# in, 1x1, 3x3 reduced, 3x3, "5x5" reduced, "5x5", after pooling
INCEPTIONS_AT_28 = ((192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64))
INCEPTIONS_AT_14 = (
    (480, 192, 96, 208, 16, 48, 64),
    (512, 160, 112, 224, 24, 64, 64),
    (512, 128, 128, 256, 24, 64, 64),
    (512, 112, 144, 288, 32, 64, 64),
    (528, 256, 160, 320, 32, 128, 128),
)
INCEPTIONS_AT_7 = ((832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128))


def unit(channels_in: int, channels_out: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    layers = conv_norm(channels_in, channels_out, kernel_size, stride=stride, epsilon=EPSILON)
    return nn.Sequential(*layers, nn.ReLU(inplace=True))


def halve() -> nn.MaxPool2d:
    """Half the picture's side, rounded up as in the original."""
    return nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True)


class Inception(nn.Module):
    """Four views of one input, side by side.

    The "5x5" branch has a 3x3 kernel, as in the networks whose 6,624,904 parameters everybody
    knows.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        channels, one, three_in, three, five_in, five, pooled = widths
        self.branches = nn.ModuleList(
            [
                unit(channels, one, 1),
                nn.Sequential(unit(channels, three_in, 1), unit(three_in, three, 3)),
                nn.Sequential(unit(channels, five_in, 1), unit(five_in, five, 3)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), unit(channels, pooled, 1)),
            ]
        )

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([branch(features) for branch in self.branches], dim=1)


class GoogLeNet(FeaturesThenClassifier):
    """Dropout is off unless asked for: see AlexNet."""

    def __init__(
        self, *, input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            unit(input_shape[0], 64, 7, stride=2),
            halve(),
            unit(64, 64, 1),
            unit(64, 192, 3),
            halve(),
            *(Inception(widths) for widths in INCEPTIONS_AT_28),
            halve(),
            *(Inception(widths) for widths in INCEPTIONS_AT_14),
            nn.MaxPool2d(kernel_size=2, stride=2, ceil_mode=True),
            *(Inception(widths) for widths in INCEPTIONS_AT_7),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1024, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, mean=0.0, std=0.01, a=-2, b=2)
