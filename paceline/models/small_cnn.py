"""P2's convolutional networks for MNIST and CIFAR-10: conv 32, conv 64, full 1024."""

from torch import nn

from paceline.models.layers import FeaturesThenClassifier, fill_bias, pooled_size


class SmallCNN(FeaturesThenClassifier):
    """5x5 convolutions of stride 1, each with 2x2 max pooling and ReLU (pooled first: cheaper)."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        flat = 64 * pooled_size(pooled_size(height)) * pooled_size(pooled_size(width))
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=5, padding=2),
            nn.MaxPool2d(kernel_size=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, kernel_size=5, padding=2),
            nn.MaxPool2d(kernel_size=2),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Sequential(
            nn.Linear(flat, 1024), nn.ReLU(inplace=True), nn.Linear(1024, num_classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                fill_bias(module, 0.0)
