"""What the scripts of this folder share: data, a model, and how they tell their numbers.

A script declares `EXPECTED` where it differs from what tests/test_scripts.py expects of all, trains
for a few steps, and leaves a dictionary `result`: name -> numbers, alike on every worker.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_INPUTS = 6


def loader(steps: int = 10, batch: int = 16) -> DataLoader:
    """The same samples in the same order, whoever asks."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(steps * batch, NUM_INPUTS, generator=generator)
    noise = 0.1 * torch.randn(steps * batch, generator=generator)
    targets = torch.sin(inputs.sum(1)) + noise
    return DataLoader(TensorDataset(inputs, targets[:, None]), batch_size=batch)


class Net(nn.Module):
    """Two layers, and methods of its own beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_INPUTS, 8)
        self.last = nn.Linear(8, 1)

    def encode(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.first(inputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.encode(inputs))


class Breaks(torch.autograd.Function):
    """Passes values on; `backward` raises where it is told to, as it does when memory runs out."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.breaks:
            raise MemoryError("no more")
        return gradient, None


def numbers(*tensors: Tensor | nn.Module | float | Iterable[Tensor]) -> list[float]:
    """Every value of tensors, or of the parameters of models, one after the other."""
    values: list[float] = []
    for thing in tensors:
        if isinstance(thing, nn.Module):
            values += numbers(*thing.parameters())
        elif isinstance(thing, Tensor):
            values += [float(value) for value in thing.detach().flatten().tolist()]
        elif isinstance(thing, float | int):
            values.append(float(thing))
        else:
            values += numbers(*thing)
    return values
