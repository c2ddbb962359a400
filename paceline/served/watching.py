"""What the first step of a script shows: whether its gradients may leave as they are made.

In that step nothing is special: gradients are averaged into `grad`, and the script's own optimizer
updates. Gradients are of a class that notes what is done with them, and weights that of somebody
who reads them between backward and `optimizer.step()`.
"""

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from paceline.served.weights import UNTOUCHING


class Style(IntEnum):
    """Who updates the weights, and when gradients leave; a larger one suits more scripts."""

    STREAM = 0
    """Gradients leave as they are made; servers update when all are there."""

    HOLD = 1
    """The same, but servers wait for `optimizer.step()`, which may scale them all."""

    WORKER = 2
    """Servers average; every worker has the mean in `grad` and updates by itself."""


HOLDS_GRADIENTS = "it keeps its gradients, or memory that they lie in"
CLIPPED = "it clips gradients, or changes settings, before the step"


class Watch:
    """What was seen since the last step."""

    def __init__(self) -> None:
        self.is_on = True
        self._backwards = 0
        self._done: set[str] = set()
        self._norms_asked = False
        self._factors: dict[int, float] = {}
        self._gradients: list[Tensor | None] = []
        self._settings: Any = None
        self._why = ""

    def backward(self, gradients: list[Tensor | None], settings: Any) -> list[Tensor | None]:
        """A backward pass has ended, with these settings of the optimizer: watch its gradients."""
        self._backwards += 1
        self._settings, self._factors = settings, {}
        self._gradients = [g if g is None else WatchedGradient.of(g, self) for g in gradients]
        return self._gradients

    def refuse_servers(self, why: str) -> None:
        """The script does what servers could not know of."""
        if self.is_on:
            self._why = self._why or why

    def looked(self, function: Any, arguments: Any) -> None:
        """A gradient was used: by the optimizer, unless the watch is on."""
        if not self.is_on or function in UNTOUCHING:
            return
        if function is torch.linalg.vector_norm and arguments[1:] in ((), (2,), (2.0,)):
            self._norms_asked = True
        elif function is Tensor.mul_ and _is_scalar(arguments[1]):
            key = id(arguments[0])
            self._factors[key] = self._factors.get(key, 1.0) * float(arguments[1])
        else:
            self._done.add(getattr(function, "__name__", str(function)))

    def foresee(self, clips: bool) -> tuple[Style, str]:
        """What is allowed where it is known before any step how gradients are used."""
        self.is_on = False
        if self._why:
            return Style.WORKER, self._why
        return (Style.HOLD, CLIPPED) if clips else (Style.STREAM, "")

    def style(self, gradients: list[Tensor | None], settings: Any) -> tuple[Style, str]:
        """What the step that begins here allows, and why it is not more."""
        if self._backwards != 1:
            self.refuse_servers(f"{self._backwards} backward passes make one step")
        if any(a is not b for a, b in zip(gradients, self._gradients, strict=False)):
            self.refuse_servers("it replaces gradients before the step")
        self._gradients = []  # nobody asks again, and the script may let go of them
        if self._done:
            used = ", ".join(sorted(self._done))
            self.refuse_servers(f"it uses gradients before the step ({used})")
        factors = {self._factors.get(id(g), 1.0) for g in gradients if g is not None}
        if len(factors) > 1:
            self.refuse_servers("it scales gradients differently")
        if self._why:
            return Style.WORKER, self._why
        if self._norms_asked or factors - {1.0} or settings != self._settings:
            return Style.HOLD, CLIPPED
        return Style.STREAM, ""


class WatchedGradient(Tensor):
    """A gradient like any other that notes what is done with it."""

    watch: Watch

    @classmethod
    def of(cls, gradient: Tensor, watch: Watch) -> "WatchedGradient":
        made: WatchedGradient = gradient.as_subclass(cls)
        made.watch = watch
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for watch in {value.watch for value in _watched((args, kwargs))}:
            watch.looked(func, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, float | int) or (isinstance(value, Tensor) and value.ndim == 0)


def _watched(value: Any) -> list[WatchedGradient]:
    if isinstance(value, WatchedGradient):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [found for part in value for found in _watched(part)]
    return []
