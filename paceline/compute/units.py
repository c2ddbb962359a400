"""A model as a row of units that may lie on different workers: what a pipeline cuts.

A unit is a module that owns parameters with the modules without any after it, so that nothing that
works in place begins one. A model shows its row by a method `units()` that returns (name, module)
pairs to be called one after the other; a plain `nn.Sequential` is a row already. Rows inside rows
are opened, but for those that do more than calling their modules: hooks would be lost.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from paceline.errors import SpecError

WHERE = "architecture pipeline"

NamedModules = list[tuple[str, nn.Module]]


class Unit(NamedTuple):
    """Modules called one after the other, each with the prefix of its names in the model."""

    name: str
    modules: NamedModules

    @property
    def words(self) -> str:
        """All of its modules, for a sentence about one of them."""
        first, last = self.modules[0][0], self.modules[-1][0]
        return first if first == last else f"{first} to {last}"

    @property
    def parameter_bytes(self) -> int:
        parameters = {id(p): p for _, module in self.modules for p in module.parameters()}
        return sum(p.numel() * p.element_size() for p in parameters.values())


class UnitChain(nn.Module):
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
        pairs = _checked(model, shown())
    elif type(model) is nn.Sequential:
        _require_plain("", model)
        pairs = [("", model)]
    else:
        problem = f"{type(model).__name__} does not show which modules it calls in a row."
        fix = "return an nn.Sequential, or give it a method units() -> [(name, module), …]."
        raise SpecError(WHERE, problem, fix)
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
    if not units:
        problem = f"{type(model).__name__} calls no module with parameters in its row."
        raise SpecError(WHERE, problem, "let units() return every module that is called.")
    _require_hooks_inside(model, units)
    return units


def _checked(model: nn.Module, shown: object) -> NamedModules:
    """Return what the `units()` of a model returned, if it has the expected form."""
    pairs: NamedModules = []
    for pair in shown if isinstance(shown, Iterable) else [shown]:
        match pair:
            case (str() as name, nn.Module() as module):
                pairs.append((name, module))
                continue
        problem = f"units() of {type(model).__name__} has {pair!r:.60} in it."
        fix = "return (name, module) pairs; a function becomes a module with it as its forward."
        raise SpecError(WHERE, problem, fix)
    return pairs


def _opened(pairs: NamedModules) -> Iterator[tuple[str, nn.Module]]:
    for name, module in pairs:
        if type(module) is nn.Sequential and not _does_more(module):
            prefix = f"{name}." if name else ""
            # Not named_children(), which leaves out a module that is called a second time.
            yield from _opened([(f"{prefix}{key}", child) for key, child in _called(module)])
        else:
            yield name, module


def _called(row: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    for key, child in row._modules.items():
        assert child is not None, "nn.Sequential calls all it has"
        yield key, child


def _does_more(module: nn.Module) -> bool:
    """Return whether calling a module does more than its class says."""
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return any(hooks) or "forward" in vars(module)


def _require_hooks_inside(model: nn.Module, units: Iterable[Unit]) -> None:
    """SpecError for hooks on a module that is never called as a whole."""
    called = {
        id(inner) for unit in units for _, module in unit.modules for inner in module.modules()
    }
    for name, module in model.named_modules():
        if id(module) not in called:
            _require_plain(name, module)


def _require_plain(name: str, module: nn.Module) -> None:
    if _does_more(module):
        problem = f'"{name}"' if name else "the model itself"
        problem += f" ({type(module).__name__}) has hooks, and would be taken apart."
        raise SpecError(WHERE, problem, "put the hooks on its modules, or use ring.")
