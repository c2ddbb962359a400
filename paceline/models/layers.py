"""Pieces that several model families share. Whole networks live in the family's own file."""

import torch
from torch import Tensor, nn
from torch.nn import functional


def pooled_size(size: int) -> int:
    """Side of a picture after a 2x2 pooling of stride 2."""
    return size // 2


def fill_bias(module: nn.Conv2d | nn.Linear, value: float) -> None:
    """Set every bias of `module` to `value`; a layer without bias is left alone."""
    if module.bias is not None:
        nn.init.constant_(module.bias, value)


class FeaturesThenClassifier(nn.Module):
    """A network of two parts: pictures to features, flat features to classes."""

    features: nn.Module
    classifier: nn.Module

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return logits

    def units(self) -> list[tuple[str, nn.Module]]:
        """See `models.units`."""
        return [
            ("features", self.features),
            ("", nn.Flatten(1)),
            ("classifier", self.classifier),
        ]


class PointConv2d(nn.Conv2d):
    """A 1x1 convolution; on a CPU, of pictures with channels last, one matrix product.

    The convolution would copy its weights into another order in each pass, which at the small
    pictures of deep layers costs more than the arithmetic: ResNet-50 at 32x32 trains about 1.35
    times as fast this way (docs/experiments.md). Parameters are a convolution's.
    """

    def forward(self, features: Tensor) -> Tensor:
        last = features.is_contiguous(memory_format=torch.channels_last)
        if features.device.type != "cpu" or not last:
            return super().forward(features)
        down, across = self.stride
        pixels = features.permute(0, 2, 3, 1)[:, ::down, ::across]
        mixed = functional.linear(pixels, self.weight.flatten(1), self.bias)
        return mixed.permute(0, 3, 1, 2)


def conv_norm(
    channels_in: int,
    channels_out: int,
    kernel_size: int,
    *,
    stride: int = 1,
    groups: int = 1,
    epsilon: float = 1e-5,
) -> list[nn.Module]:
    """A convolution that keeps the picture's size (over `stride`), and its batch norm.

    The convolution has no bias: the norm subtracts it again.
    """
    kind = PointConv2d if kernel_size == 1 else nn.Conv2d
    padding = kernel_size // 2
    return [
        kind(channels_in, channels_out, kernel_size, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(channels_out, eps=epsilon),
    ]
