"""What servers do with gradients: means, and the optimizer where the weights live.

It is torch's own class, run chunk by chunk.

Only optimizers that treat every element by itself can run on a chunk (`spec/optimizers.py`).
Numbers that belong to a whole parameter (how many steps it has seen) are kept for each parameter
of a chunk once they differ: a parameter without a gradient does not take part in a step.

Means of several workers' gradients are made where they lie, block by block: a block stays in the
core's own cache until every worker's part is in. NumPy adds, not torch: its kernels use the widest
vectors of the core, and a call costs a fraction of one into torch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.protocol.messages import Setting, Settings
from paceline.served.keras_rules import KERAS_RULES
from paceline.served.memory import Piece, gather
from paceline.spec.optimizers import OPTIMIZERS

TORCH = {facts.class_name: facts for facts in OPTIMIZERS.values() if facts.is_elementwise}
ELEMENTWISE: dict[str, type[Optimizer]] = {
    **{name: getattr(torch.optim, name) for name in TORCH},
    **{kind.__name__: kind for kind in KERAS_RULES},
}
EXACTLY_FUSED = (torch.float32, torch.float64)
"""torch 2.13's fused SGD leaves most elements of a bfloat16 parameter as they were."""

NUMBERS = {"step", "mu_product", "eta", "mu"}
"""What they keep of a whole parameter; the rest of their state is one number per element. By shape
the two cannot be told apart where a parameter has one element."""

NOT_SENT = {"params", "foreach", "fused", "capturable", "differentiable"}
"""Settings of how torch runs an optimizer, not of what it computes."""

HARMLESS = {"__init__", "__doc__", "__module__", "__qualname__", "step", "__annotations__"}
"""What a subclass may define and still compute as its base does, if its `step` is the base's."""

Scalars = list[dict[str, float]]
"""For each parameter of a chunk, the numbers of its state that are not one per element.

A parameter with any state has the number `EXISTS` too; one that has never taken part has none.
"""

EXISTS = ""


def server_class(optimizer: Optimizer) -> str:
    """The class that servers run in an optimizer's place; empty when it cannot be cut."""
    kind = type(optimizer)
    base = next((c for c in kind.__mro__ if ELEMENTWISE.get(c.__name__) is c), None)
    if base is None or inspect.unwrap(kind.step) is not inspect.unwrap(base.step):
        return ""
    own = {name for c in kind.__mro__[: kind.__mro__.index(base)] for name in vars(c)}
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return base.__name__ if own <= HARMLESS and not differentiable else ""


def settings_of(optimizer: Optimizer) -> list[Settings]:
    return [
        {name: _plain(value) for name, value in group.items() if _is_sent(name, value)}
        for group in optimizer.param_groups
    ]


def _is_sent(name: str, value: Any) -> bool:
    """Not what no element-wise optimizer reads: names of parameters, a script's own lists."""
    sendable = isinstance(value, (int, float, str, Tensor, type(None))) or (
        isinstance(value, (list, tuple)) and all(isinstance(p, (int, float, Tensor)) for p in value)
    )
    return name not in NOT_SENT and not name.startswith("_") and sendable


def _plain(value: Any) -> Setting:
    if isinstance(value, Tensor):
        return float(value)
    return [float(part) for part in value] if isinstance(value, (list, tuple)) else value


class _Part:
    """Some parameters of a chunk that have always taken part in the same steps."""

    def __init__(self, elements: slice, parameter: Tensor, optimizer: Optimizer) -> None:
        self.elements, self.parameter, self.optimizer = elements, parameter, optimizer

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return state


class _Chunk:
    """The weights of a chunk, where its parameters lie in it, and its optimizers."""

    def __init__(self, weights: Tensor, group: int, ranges: Sequence[slice]) -> None:
        self.weights, self.group, self.ranges = weights, group, list(ranges)
        self.parts: list[_Part] = []

    @property
    def is_split(self) -> bool:
        return len(self.parts) > 1


class ChunkOptimizers:
    """torch optimizers for each chunk, all of one class."""

    def __init__(self, kind: str, groups: Sequence[Settings]) -> None:
        self._class, self._facts = ELEMENTWISE[kind], TORCH.get(kind)
        # Without the wrappers for profilers and compilers, which cost more than a small chunk's
        # arithmetic; callers run under no_grad.
        self._step: Callable[[Optimizer], object] = inspect.unwrap(self._class.step)
        self._groups = [_arguments(group) for group in groups]
        self._chunks: dict[int, _Chunk] = {}

    def add(self, chunk: int, weights: Tensor, group: int, ranges: Sequence[slice]) -> None:
        """Serve this chunk: its weights are updated in place. `ranges`: where parameters lie."""
        self._chunks[chunk] = one = _Chunk(weights, group, ranges)
        one.parts = [self._part(one, slice(0, weights.numel()))]

    def apply(
        self,
        chunk: int,
        gradient: Tensor,
        groups: Sequence[Settings],
        spared: Sequence[slice] = (),
        rate_factor: float = 1.0,
    ) -> None:
        """Make one step on a chunk; the elements in `spared` and their state stay as they are."""
        one = self._chunks[chunk]
        if spared and not one.is_split:
            self._split(one)
        settings = _arguments(groups[one.group])
        if rate_factor != 1.0:
            settings["lr"] *= rate_factor
        for part in one.parts:
            if one.is_split and any(part.elements.start == s.start for s in spared):
                continue
            part.optimizer.param_groups[0].update(settings)
            part.parameter.grad = gradient[part.elements]
            self._step(part.optimizer)
            part.parameter.grad = None

    def state(self, chunk: int) -> tuple[dict[str, Tensor], Scalars]:
        """The state of a chunk: tensors of its length, and each parameter's other numbers."""
        one = self._chunks[chunk]
        tensors: dict[str, Tensor] = {}
        by_part: Scalars = []
        for part in one.parts:
            by_part.append({EXISTS: 1.0} if part.state else {})
            for name, value in part.state.items():
                if is_elementwise_state(name, value, one.weights.numel()):
                    tensors[name] = value.clone()
                elif is_elementwise_state(name, value, part.parameter.numel()):
                    whole = tensors.setdefault(name, torch.zeros_like(one.weights))
                    whole[part.elements] = value
                elif value is not None:
                    by_part[-1][name] = float(value)
        return tensors, by_part if one.is_split else by_part * len(one.ranges)

    def set_state(self, chunk: int, tensors: Mapping[str, Tensor], scalars: Scalars) -> None:
        one = self._chunks[chunk]
        if any(numbers != scalars[0] for numbers in scalars):
            self._split(one)
        for number, part in enumerate(one.parts):
            numbers = scalars[number]
            state: dict[str, Any] = {
                name: value[part.elements].clone() for name, value in tensors.items()
            }
            state |= {n: torch.tensor(v) for n, v in numbers.items() if n != EXISTS}
            part.optimizer.state.pop(part.parameter, None)
            if EXISTS in numbers:
                part.optimizer.state[part.parameter] = state

    def _split(self, one: _Chunk) -> None:
        """From here on each parameter of a chunk has an optimizer of its own."""
        (whole,) = one.parts
        one.parts = [self._part(one, elements) for elements in one.ranges]
        for part in one.parts:
            for name, value in whole.state.items():
                elementwise = is_elementwise_state(name, value, whole.parameter.numel())
                held = value[part.elements] if elementwise else value
                copied = held.clone() if isinstance(held, Tensor) else held
                part.optimizer.state[part.parameter][name] = copied

    def _part(self, one: _Chunk, elements: slice) -> _Part:
        parameter = torch.nn.Parameter(one.weights[elements])
        known = inspect.signature(self._class).parameters
        settings = {k: v for k, v in self._groups[one.group].items() if k in known}
        is_fused = self._facts is not None and self._facts.is_fused
        if is_fused and parameter.dtype in EXACTLY_FUSED:
            settings["fused"] = True
        return _Part(elements, parameter, self._class([parameter], **settings))


def is_elementwise_state(name: str, value: Any, elements: int) -> bool:
    return name not in NUMBERS and isinstance(value, Tensor) and value.numel() == elements


def _arguments(settings: Mapping[str, Setting]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


BLOCK_ELEMENTS = 64 * 1024
"""256 KiB of float32: of the sizes tried, the fastest on cores with 1 MiB of second-level cache."""

Part = tuple[list[Piece], float]
"""One worker's gradient of a chunk and its weight."""

Array = np.ndarray[Any, Any]


def mean(parts: Sequence[Part], into: Tensor) -> Tensor:
    """Write the weighted mean of the parts into `into`; their weights sum to one or less.

    Less, when a worker without a gradient counts as zero.
    """
    values = [_whole(pieces, into) for pieces, _ in parts]
    weights = [weight for _, weight in parts]
    if into.dtype in (torch.float16, torch.bfloat16):
        exact = torch.empty(into.shape, dtype=torch.float32)
        _sum([value.float().numpy() for value in values], weights, exact.numpy())
        return into.copy_(exact)
    _sum([value.numpy() for value in values], weights, into.numpy())
    return into


def only(parts: Sequence[Part], elements: int) -> Tensor | None:
    """The gradient that is its own mean: one worker's, whole, with all the weight."""
    match parts:
        case [([(0, stop, values)], 1.0)] if stop == elements:
            return values
    return None


def _sum(values: Sequence[Array], weights: Sequence[float], into: Array) -> None:
    """Sum of the values times their weights; equal ones are multiplied in once, at the end."""
    alike = all(weight == weights[0] for weight in weights)
    scaled = into[:0] if alike else np.empty(min(BLOCK_ELEMENTS, into.size), into.dtype)
    for start in range(0, into.size, BLOCK_ELEMENTS):
        block, first, *others = (array[start : start + BLOCK_ELEMENTS] for array in (into, *values))
        if alike:
            for value in others:
                first = np.add(first, value, out=block)
            np.multiply(first, weights[0], out=block)
        else:
            np.multiply(first, weights[0], out=block)
            for value, weight in zip(others, weights[1:], strict=True):
                block += np.multiply(value, weight, out=scaled[: block.size])


def _whole(pieces: list[Piece], like: Tensor) -> Tensor:
    """The one piece that covers all, if there is one; else all of them in a tensor `like` it."""
    if len(pieces) == 1 and pieces[0][:2] == (0, like.numel()):
        return pieces[0][2]
    return gather(pieces, torch.empty_like(like))
