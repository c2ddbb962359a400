"""`tutorial-cnn`: the CIFAR-10 network of the TensorFlow tutorial, P1's workload.

Two convolutions of 64 filters 5x5, each followed by pooling, then fully connected layers of 384
and 192. The tutorial's local response normalisation is left out: it has no parameters, it is in no
network built today, and no library still makes it fast.
"""

from torch import nn

from paceline.models.layers import FeaturesThenClassifier, fill_bias, pooled_size


class TutorialCNN(FeaturesThenClassifier):
    """Pooling comes before the ReLU: the same result, with a quarter of the ReLU's work."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        flat = 64 * pooled_size(pooled_size(height)) * pooled_size(pooled_size(width))
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, kernel_size=5, padding=2),
            nn.MaxPool2d(kernel_size=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(64, 64, kernel_size=5, padding=2),
            nn.MaxPool2d(kernel_size=2),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Sequential(
            nn.Linear(flat, 384),
            nn.ReLU(inplace=True),
            nn.Linear(384, 192),
            nn.ReLU(inplace=True),
            nn.Linear(192, num_classes),
        )
        self._reset()

    def _reset(self) -> None:
        """The tutorial's own start: truncated normal weights, small positive biases."""
        deviations = {"features.0": 0.05, "features.3": 0.05, "classifier.4": 1 / 192}
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                deviation = deviations.get(name, 0.04)
                nn.init.trunc_normal_(module.weight, 0, deviation, -2 * deviation, 2 * deviation)
                fill_bias(module, 0.0 if name in {"features.0", "classifier.4"} else 0.1)
