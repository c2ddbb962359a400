"""`resnet50`, `resnet101`, `resnet152`, and ResNeXt: the same blocks with grouped convolutions.

Bottleneck blocks have their stride in the 3x3 convolution.

32x32 pictures go through the ImageNet network unchanged, as the papers (and the other tools we are
compared with) run it on CIFAR-10: same layers, same parameters, global pooling over what is left.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.layers import conv_norm

RESNET50 = (3, 4, 6, 3)
RESNET101 = (3, 4, 23, 3)
RESNET152 = (3, 8, 36, 3)
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up by four, added to the input.

    ResNeXt widens the middle and divides it into `groups`, each `group_width` channels wide where
    `width` is 64.
    """

    def __init__(
        self, channels: int, width: int, stride: int, groups: int = 1, group_width: int = 64
    ) -> None:
        super().__init__()
        widened, middle = width * EXPANSION, width * group_width // 64 * groups
        self.residual = nn.Sequential(
            *conv_norm(channels, middle, 1),
            nn.ReLU(inplace=True),
            *conv_norm(middle, middle, 3, stride=stride, groups=groups),
            nn.ReLU(inplace=True),
            *conv_norm(middle, widened, 1),
        )
        keeps_shape = stride == 1 and channels == widened
        shortcut = [] if keeps_shape else conv_norm(channels, widened, 1, stride=stride)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, features: Tensor) -> Tensor:
        return functional.relu_(self.residual(features).add_(self.shortcut(features)))


class ResNet(nn.Module):
    """`depths` counts the blocks of each of the four stages."""

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        depths: tuple[int, ...],
        groups: int = 1,
        group_width: int = 64,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *conv_norm(input_shape[0], 64, 7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        stages, channels = [], 64
        for index, depth in enumerate(depths):
            width, first_stride = 64 * 2**index, 1 if index == 0 else 2
            for block in range(depth):
                stride = first_stride if block == 0 else 1
                stages.append(Bottleneck(channels, width, stride, groups, group_width))
                channels = width * EXPANSION
        self.stages = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.stages(self.stem(images)), 1))
        return logits

    def units(self) -> list[tuple[str, nn.Module]]:
        """See `models.units`."""
        return [
            ("stem", self.stem),
            ("stages", self.stages),
            ("", nn.Flatten(1)),
            ("classifier", self.classifier),
        ]
