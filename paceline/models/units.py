"""A model as a row of units that may lie on different workers: what a pipeline cuts.

A unit is a module that owns parameters with the modules without any after it, so that nothing that
works in place begins one. A model shows its row by a method `units()` that returns (name, module)
pairs to be called one after the other; a plain `nn.Sequential` is a row already. Rows inside rows
are opened.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from paceline.errors import SpecError

NamedModules = list[tuple[str, nn.Module]]


class Unit(NamedTuple):
    """Modules called one after the other, each with the prefix of its names in the model."""

    name: str
    modules: NamedModules

    @property
    def parameter_bytes(self) -> int:
        parameters = {id(p): p for _, module in self.modules for p in module.parameters()}
        return sum(p.numel() * p.element_size() for p in parameters.values())


class Row(nn.Module):
    """Units called one after the other; parameters keep the names they have in the whole model."""

    def __init__(self, units: Iterable[Unit]) -> None:
        super().__init__()
        named = [pair for unit in units for pair in unit.modules]
        self.prefixes = [prefix for prefix, _ in named]
        self.parts = nn.ModuleList(module for _, module in named)

    def forward(self, features: Tensor) -> Tensor:
        for part in self.parts:
            features = part(features)
        return features

    def named_in_model(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, part in zip(self.prefixes, self.parts, strict=True):
            for name, parameter in part.named_parameters():
                yield f"{prefix}.{name}" if prefix else name, parameter


def units_of(model: nn.Module) -> list[Unit]:
    """The row of a model; SpecError for one that does not show it."""
    shown = getattr(model, "units", None)
    if callable(shown):
        pairs: NamedModules = list(shown())
    elif type(model) is nn.Sequential:
        pairs = [("", model)]
    else:
        problem = f"{type(model).__name__} does not show which modules it calls in a row."
        fix = "return an nn.Sequential, or give it a method units() -> [(name, module), …]."
        raise SpecError("architecture pipeline", problem, fix)
    units: list[Unit] = []
    before: NamedModules = []
    for name, module in _opened(pairs):
        if next(module.parameters(), None) is not None:
            units.append(Unit(name, [*before, (name, module)]))
            before = []
        elif units:
            units[-1].modules.append((name, module))
        else:
            before.append((name, module))
    return units


def _opened(pairs: NamedModules) -> Iterator[tuple[str, nn.Module]]:
    for name, module in pairs:
        if type(module) is nn.Sequential:
            prefix = f"{name}." if name else ""
            yield from _opened(
                [(f"{prefix}{key}", child) for key, child in module.named_children()]
            )
        else:
            yield name, module
