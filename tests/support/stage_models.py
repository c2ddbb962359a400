"""Models that a pipeline must train as one worker does, and models that it must refuse."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def plain() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(48, 32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def started(start: Callable[[Tensor], object]) -> nn.Sequential:
    model = plain()
    with torch.no_grad():
        for layer in (model[1], model[3], model[5]):
            start(layer.weight)
    return model


def shared_activation() -> nn.Module:
    act = nn.ReLU()
    layers = [nn.Linear(48, 32), act, nn.Linear(32, 32), act, nn.Linear(32, 32), act]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(32, 10))


def shared_layer() -> nn.Module:
    layer, between = nn.Linear(48, 48), [nn.Tanh(), nn.Linear(48, 48), nn.Tanh()]
    return nn.Sequential(nn.Flatten(), layer, *between, layer, nn.Tanh(), nn.Linear(48, 10))


def shared_block() -> nn.Module:
    block = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), block, block, block, nn.Linear(32, 10))


def orthogonal() -> nn.Module:
    return started(nn.init.orthogonal_)


def sparse() -> nn.Module:
    return started(lambda weight: nn.init.sparse_(weight, 0.3, 0.2))


def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(4)
    return started(lambda weight: weight.normal_(0, 0.3, generator=generator))


def reads_numbers() -> nn.Module:
    factor = torch.rand(1).item() + 0.5
    return started(lambda weight: weight.mul_(factor))


def gradient_hook() -> nn.Module:
    model = plain()
    model[3].weight.register_hook(lambda gradient: gradient * 0.1)
    return model


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.rand(32) + 0.5  # no buffer

    def forward(self, features: Tensor) -> Tensor:
        return features * self.factors


def tensor_attribute() -> nn.Module:
    layers = list(plain())
    return nn.Sequential(*layers[:3], Scaled(), *layers[3:])


def hooked_inside() -> nn.Module:
    inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    inner.register_forward_hook(lambda module, given, output: output * 0.25)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), inner, nn.Linear(32, 10))


def frozen_beginning() -> nn.Module:
    model = plain()
    for layer in (model[1], model[3]):
        layer.requires_grad_(False)
    return model


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 32)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features).t().contiguous().t()


def not_contiguous() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Turned(), nn.Linear(32, 10))


class Widened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features).expand(-1, 32)


def expanded() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Widened(), nn.Linear(32, 10))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(48, 32), nn.Linear(48, 32)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(features), self.other(features)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.layer(pair[0] * pair[1])


def tuple_between() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Two(), Joined(), nn.Linear(32, 10))


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 8)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features).argmax(1)


def whole_numbers_between() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Chosen(), nn.Embedding(8, 16), nn.Linear(16, 10))


def tied() -> nn.Module:
    first, last = nn.Linear(48, 48), nn.Linear(48, 48)
    last.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), last, nn.Linear(48, 10))


FOLLOW = (
    plain,
    shared_activation,
    shared_layer,
    shared_block,
    orthogonal,
    sparse,
    own_generator,
    reads_numbers,
    gradient_hook,
    tensor_attribute,
    hooked_inside,
    frozen_beginning,
    not_contiguous,
    expanded,
    tuple_between,
    whole_numbers_between,
    tied,
)
"""What a pipeline trains like one worker."""


class Shown(nn.Module):
    """Its units leave out what its forward does between them."""

    def __init__(self, *shown: object) -> None:
        super().__init__()
        self.flat, self.one, self.two = nn.Flatten(), nn.Linear(48, 32), nn.Linear(32, 10)
        self.shown = shown

    def forward(self, features: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(self.flat(features))))

    def units(self) -> list[tuple[str, nn.Module]]:
        return [("flat", self.flat), ("one", self.one), ("two", self.two)]


class Bare(Shown):
    def units(self):
        return [self.flat, self.one, self.two]


class Functions(Shown):
    def units(self):
        return [("flat", self.flat), ("one", lambda x: self.one(x).relu()), ("two", self.two)]


class Empty(Shown):
    def units(self):
        return []


class WithHooks(Shown):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda module, given, output: None)


def hooked_outside() -> nn.Module:
    model = plain()
    model.register_forward_hook(lambda module, given, output: output * 0.25)
    return model


class Varying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(48, 32), 0

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(features)[:, : 8 + self.calls]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 10)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features.mean(1, keepdim=True))


def varying() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Varying(), Mean())


def all_frozen() -> nn.Module:
    return plain().requires_grad_(False)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.Linear(32, 10))


def one_unit() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 10))


REFUSED = {
    Shown: "compute something else than the model",
    Bare: r"\(name, module\) pairs",
    Functions: r"\(name, module\) pairs",
    Empty: "no module with parameters",
    WithHooks: "the model itself .* has hooks",
    hooked_outside: "the model itself .* has hooks",
    all_frozen: "nothing to train",
    lazy: "no shape yet",
    one_unit: "1 units .* choose ring",
}
"""What it refuses on every worker alike, and with which words."""
