"""CUDA graphs: a model's forward and backward pass recorded once and replayed in every step.

Starting a kernel takes the host some microseconds, and a small network has hundreds of kernels of
less than that: the device waits for the host. A recorded pass starts with one call. Only what the
device does is recorded, so this is for models whose Python does the same in every step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Bare(nn.Module):
    """A model without the hooks around it: what is recorded."""

    def __init__(self, model: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self._forward(inputs)


def record_passes(model: nn.Module, inputs: Tensor) -> None:
    """Let training passes of `model` over batches like `inputs` be replays from now on.

    Called under the autocast that training uses. Weights, buffers and gradients are afterwards what
    they were; batches of another shape, and evaluation, go the ordinary way. Each replay writes its
    gradients over the last one's, so they cannot be accumulated.
    """
    plain: Callable[[Tensor], Tensor] = model.forward
    shape = inputs.shape
    # Recording uses a stream of its own. The nodes that put gradients in their places belong to the
    # stream in which they are made, and would wait for that one in every step to come.
    places = [_place_of(p) for p in model.parameters() if p.requires_grad]
    buffers = [buffer.clone() for buffer in model.buffers()]
    kind = inputs.device.type
    with torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,  # a cached cast would be made once, outside the recording
    ):
        recorded: Any = torch.cuda.make_graphed_callables(
            _Bare(model, plain), (torch.empty_like(inputs).copy_(inputs),)
        )
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)

    def forward(batch: Tensor, places: list[Any] = places) -> Tensor:
        replays = model.training and torch.is_grad_enabled() and batch.shape == shape
        passed: Tensor = recorded(batch) if replays else plain(batch)
        return passed

    replaced: Any = model
    replaced.forward = forward


def _place_of(parameter: Tensor) -> Any:
    """Autograd's node that puts a parameter's gradient in its place; it lives while it is held."""
    function: Any = parameter.view_as(parameter).grad_fn
    return function.next_functions[0][0]
