"""Pieces that several model families share. Whole networks live in the family's own file."""

from torch import nn


def pooled_size(size: int) -> int:
    """Side of a picture after a 2x2 pooling of stride 2."""
    return size // 2


def fill_bias(module: nn.Conv2d | nn.Linear, value: float) -> None:
    """Set every bias of `module` to `value`; a layer without bias is left alone."""
    if module.bias is not None:
        nn.init.constant_(module.bias, value)


def conv_norm(
    channels_in: int, channels_out: int, kernel_size: int, *, stride: int = 1, epsilon: float = 1e-5
) -> list[nn.Module]:
    """A convolution that keeps the picture's size (over `stride`), and its batch norm.

    The convolution has no bias: the norm subtracts it again.
    """
    padding = kernel_size // 2
    return [
        nn.Conv2d(channels_in, channels_out, kernel_size, stride, padding, bias=False),
        nn.BatchNorm2d(channels_out, eps=epsilon),
    ]
