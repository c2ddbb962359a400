"""A 1x1 convolution as a matrix product is still that convolution."""

import pytest
import torch
from torch import nn

from paceline.models.layers import PointConv2d


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_point_convolution_computes_what_a_convolution_does(stride, bias, layout):
    torch.manual_seed(0)
    plain = nn.Conv2d(6, 10, kernel_size=1, stride=stride, bias=bias)
    point = PointConv2d(6, 10, kernel_size=1, stride=stride, bias=bias)
    point.load_state_dict(plain.state_dict())
    images = torch.randn(3, 6, 5, 7).contiguous(memory_format=layout).requires_grad_()
    outputs, gradients = [], []
    for layer in (plain, point):
        outputs.append(layer(images))
        targets = [images, *layer.parameters()]
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), targets))
    torch.testing.assert_close(outputs[0], outputs[1])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(expected, found)
    assert outputs[1].is_contiguous(memory_format=layout)
