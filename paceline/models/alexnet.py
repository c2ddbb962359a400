"""`alexnet`: five convolutions and three wide fully connected layers (one tower, 61 M parameters).

The pooling before the classifier adapts to 6x6, so that smaller pictures keep all the parameters:
what makes AlexNet interesting for communication is its size.
"""

from torch import nn

from paceline.models.layers import FeaturesThenClassifier

SMALLEST_SIDE_AT_STRIDE_4 = 63
"""Below this the third pooling would have nothing left; the first stride is then 2."""


class AlexNet(FeaturesThenClassifier):
    """Dropout is off unless asked for.

    Its masks are drawn in each process, so with it n workers would not follow one on the same
    batch, and that comparison is what the model is here for.
    """

    def __init__(
        self, *, input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        channels, height, width = input_shape
        small = min(height, width) < SMALLEST_SIDE_AT_STRIDE_4
        stride, padding = (2, 5) if small else (4, 2)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, kernel_size=11, stride=stride, padding=padding),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(6),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )
