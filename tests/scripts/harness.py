"""Everything the scripts share: data, a model, ordinary steps, and the table of what is expected.

A script is a function with `@script(...)`: it trains for a few steps and returns what it trained,
and further values by name. It must not import anything of Paceline but `paceline` itself.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

NUM_INPUTS = 6
Values = dict[str, list[float]]

PATTERNS = {
    "everywhere": "*",
    "ring": "ring",
    "hybrid": "hybrid",
    "servers": "server*",
    "modes": "server:mode=*",
    "updating": "server:*update=server*",
    "asynchronous": "server:mode=async*",
    "bounded": "server:mode=bounded*",
    "quorum": "server:mode=quorum*",
    "servers_tcp": "server*transport=tcp",
    "averaging": "average*",
    "averaging_each_step": "average:every=1",
    "averaging_seldom": "average:every=4",
}
"""Keyword of `script` -> pattern of architectures; the longest pattern that matches counts."""


class Script(NamedTuple):
    function: Callable[[], Any]
    outcomes: dict[str, str]
    """Pattern of architectures -> outcome, where it is not the usual one (test_scripts.py)."""


SCRIPTS: dict[str, Script] = {}


def script(*, averages: bool = False, **outcomes: str) -> Callable[[Callable[[], Any]], Any]:
    """Register a script. `averages`: a mean of weights after every step equals a mean of gradients,
    so with `average:every=1` it trains as alone too."""
    patterns = {PATTERNS[name]: outcome for name, outcome in outcomes.items()}
    if averages:
        patterns["average:every=1"] = "equal"

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        assert function.__name__ not in SCRIPTS, function.__name__
        SCRIPTS[function.__name__] = Script(function, patterns)
        return function

    return register


def run(name: str) -> tuple[Values, Any]:
    """Run a script; return its values, and the models (or tensors) that it trained."""
    paceline.init()
    torch.manual_seed(0)
    returned = SCRIPTS[name].function()
    trained, further = returned if isinstance(returned, tuple) else (returned, {})
    values = {"weights": numbers(trained)}
    return values | {key: numbers(value) for key, value in further.items()}, trained


def loader(steps: int = 10, batch: int = 16) -> DataLoader:
    """Load the same samples in the same order on every worker."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(steps * batch, NUM_INPUTS, generator=generator)
    noise = 0.1 * torch.randn(steps * batch, generator=generator)
    targets = torch.sin(inputs.sum(1)) + noise
    return DataLoader(TensorDataset(inputs, targets[:, None]), batch_size=batch)


def batches(steps: int = 10, batch: int = 16) -> Iterable[Any]:
    """This worker's part of each of `steps` global batches."""
    return paceline.shard(loader(steps, batch), batch="global")


class Net(nn.Module):
    """Two layers, and a method of its own in addition to `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_INPUTS, 8)
        self.last = nn.Linear(8, 1)

    def encode(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.first(inputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.encode(inputs))


class Breaks(torch.autograd.Function):
    """Passes values on; `backward` raises if `breaks`, as it does when memory runs out."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.breaks:
            raise MemoryError("no more")
        return gradient, None


def distributed(
    model: nn.Module | None = None, make: Any = torch.optim.SGD, **settings: Any
) -> tuple[Any, Any]:
    """Distribute a model (default: `Net()`) and its optimizer (default: SGD with momentum)."""
    model = Net() if model is None else model
    optimizer = make(model.parameters(), **(settings or {"lr": 0.1, "momentum": 0.9}))
    return paceline.distribute(model, optimizer)


def backward(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """Make the gradients of one batch."""
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()


def take_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """Take an ordinary step."""
    backward(model, optimizer, x, y)
    optimizer.step()


def trained(model: nn.Module, optimizer: Any) -> nn.Module:
    """Take ten ordinary steps; return the model."""
    for x, y in batches():
        take_step(model, optimizer, x, y)
    return model


def descend(optimizer: Any, loss: Tensor) -> None:
    """Take a step down a loss; gradients are cleared after the forward pass."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def numbers(thing: Any) -> list[float]:
    """Every value of numbers, tensors and the parameters of models, one after the other."""
    if isinstance(thing, nn.Module):
        return numbers(thing.parameters())
    if isinstance(thing, Tensor):
        return [float(value) for value in thing.detach().flatten().tolist()]
    return [float(thing)] if isinstance(thing, float | int) else list(_each(thing))


def _each(things: Iterable[Any]) -> Iterator[float]:
    for thing in things:
        yield from numbers(thing)
