"""The optimizer where the weights live: torch's own classes, run chunk by chunk.

Only optimizers that treat every element by itself can run on a chunk; which they are is a table.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.architectures.server.control import Setting, Settings
from paceline.errors import SpecError

ELEMENTWISE: dict[str, type[Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    )
}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
"""Those with a kernel that makes one pass over memory on the CPU."""

EXACTLY_FUSED = (torch.float32, torch.float64)
"""torch 2.13's fused SGD leaves most elements of a bfloat16 parameter as they were."""

NOT_SENT = {"params", "foreach", "fused", "capturable", "differentiable"}
"""Settings of how torch runs an optimizer, not of what it computes."""


def describe(optimizer: Optimizer) -> tuple[str, list[Settings]]:
    """The class and the settings of each group as plain data; an error if it cannot be cut."""
    kind = type(optimizer)
    if ELEMENTWISE.get(kind.__name__) is not kind:
        problem = f"{kind.__name__} is not known to treat every element of a parameter by itself."
        fix = f"write server:update=worker, or one of {', '.join(ELEMENTWISE)}."
        raise SpecError("architecture server, update=server", problem, fix)
    return kind.__name__, settings_of(optimizer)


def settings_of(optimizer: Optimizer) -> list[Settings]:
    return [
        {name: _plain(value) for name, value in group.items() if _is_sent(name, value)}
        for group in optimizer.param_groups
    ]


def _is_sent(name: str, value: Any) -> bool:
    sendable = isinstance(value, (int, float, str, list, tuple, Tensor, type(None)))
    return name not in NOT_SENT and not name.startswith("_") and sendable


def _plain(value: Any) -> Setting:
    if isinstance(value, Tensor):
        return float(value)
    return [_number(part) for part in value] if isinstance(value, (list, tuple)) else value


def _number(value: Any) -> float:
    return float(value)


class ChunkOptimizers:
    """One torch optimizer per chunk, all of one class."""

    def __init__(self, kind: str, groups: Sequence[Settings]) -> None:
        self._class, self._fused = ELEMENTWISE[kind], kind in FUSED
        # Without the wrappers for profilers and compilers, which cost more than a small chunk's
        # arithmetic; callers run under no_grad.
        self._step: Callable[[Optimizer], object] = inspect.unwrap(self._class.step)
        self._groups = [_arguments(group) for group in groups]
        self._chunks: dict[int, tuple[Optimizer, Tensor, int]] = {}

    def add(self, chunk: int, weights: Tensor, group: int) -> None:
        """Serve this chunk: its weights are updated in place."""
        parameter = torch.nn.Parameter(weights)
        known = inspect.signature(self._class).parameters
        settings = {k: v for k, v in self._groups[group].items() if k in known}
        if self._fused and weights.dtype in EXACTLY_FUSED:
            settings["fused"] = True
        optimizer = self._class([parameter], **settings)
        self._chunks[chunk] = optimizer, parameter, group

    def apply(
        self,
        chunk: int,
        gradient: Tensor,
        groups: Sequence[Settings],
        spared: Sequence[slice] = (),
    ) -> None:
        """Make one step on a chunk; the elements in `spared` and their state stay as they are."""
        optimizer, parameter, group = self._chunks[chunk]
        optimizer.param_groups[0].update(_arguments(groups[group]))
        parameter.grad = gradient
        if spared:
            self._step_sparing(optimizer, parameter, spared)
        else:
            self._step(optimizer)
        parameter.grad = None

    def _step_sparing(
        self, optimizer: Optimizer, parameter: Tensor, spared: Sequence[slice]
    ) -> None:
        """As torch does for parameters without a gradient, here for parts of a chunk."""
        before = {"": parameter.detach().clone()}
        held = optimizer.state.get(parameter, {})
        before |= {
            name: values.clone()
            for name, values in held.items()
            if is_elementwise_state(values, parameter.numel())
        }
        self._step(optimizer)
        after = {"": parameter.detach(), **optimizer.state.get(parameter, {})}
        for name, values in before.items():
            for part in spared:
                after[name][part] = values[part]

    def state(self, chunk: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The state of a chunk: tensors of its length, and scalars."""
        optimizer, parameter, _ = self._chunks[chunk]
        state = optimizer.state.get(parameter, {})
        tensors = {k: v for k, v in state.items() if is_elementwise_state(v, parameter.numel())}
        scalars = {k: float(v) for k, v in state.items() if k not in tensors and v is not None}
        return tensors, scalars

    def set_state(
        self, chunk: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]
    ) -> None:
        optimizer, parameter, _ = self._chunks[chunk]
        state: dict[str, Any] = {name: values.clone() for name, values in tensors.items()}
        state |= {name: torch.tensor(value) for name, value in scalars.items()}
        if state:
            optimizer.state[parameter] = state


def is_elementwise_state(value: Any, elements: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() == elements


def _arguments(settings: Mapping[str, Setting]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
