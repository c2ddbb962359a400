"""`vgg16` and `vgg19`: 3x3 convolutions in five blocks, then two layers of 4096.

Smaller pictures than 224x224 keep all the parameters (528 MB and 548 MB, as P4 trained them on
CIFAR-10): the pooling before the classifier adapts to 7x7.
"""

from torch import nn

from paceline.models.layers import FeaturesThenClassifier, fill_bias

WIDTHS = (64, 128, 256, 512, 512)
VGG16 = (2, 2, 3, 3, 3)
VGG19 = (2, 2, 4, 4, 4)


class VGG(FeaturesThenClassifier):
    """`depths` counts the convolutions of each block. Dropout is off by default: see AlexNet."""

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        depths: tuple[int, ...],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        channels = input_shape[0]
        layers: list[nn.Module] = []
        for depth, width in zip(depths, WIDTHS, strict=True):
            for position in range(depth):
                layers.append(nn.Conv2d(channels, width, kernel_size=3, padding=1))
                if position == depth - 1:  # pooled before the ReLU: same result, less work
                    layers.append(nn.MaxPool2d(kernel_size=2))
                layers.append(nn.ReLU(inplace=True))
                channels = width
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes),
        )
        self._reset()

    def _reset(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                fill_bias(module, 0.0)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                fill_bias(module, 0.0)
