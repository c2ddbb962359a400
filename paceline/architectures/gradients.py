"""Where an exchange meets autograd: every gradient is seen as it is made, and none is missed.

Hooks on the trained tensors themselves, not on a model's forward pass: it does not matter how a
script calls its model, or whether the loss passes through it at all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.telemetry import StepClock


class Sink(Protocol):
    """Who is told of gradients."""

    def made(self, index: int) -> None:
        """The gradient of a tensor is in its `grad`; called inside backward."""

    def pass_over(self) -> None:
        """A backward pass that made gradients outside `no_sync` has ended."""


class GradientTap:
    """Hooks on a list of tensors; told again when the list changes."""

    def __init__(self, sink: Sink, clock: StepClock) -> None:
        self._sink, self._clock = sink, clock
        self._handles: list[RemovableHandle] = []
        self._paused = self._in_pass = False

    def attach(self, tensors: Sequence[Tensor]) -> None:
        """Watch these tensors, and no others."""
        self.remove()
        self._handles = [
            tensor.register_post_accumulate_grad_hook(self._hook(index))
            for index, tensor in enumerate(tensors)
        ]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients made inside stay where they are."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def made(_: Tensor) -> None:
            self._clock.ready()
            if self._paused:
                return
            if not self._in_pass:
                # As torch's own reducer does: when backward() returns, the exchange is done.
                self._in_pass = True
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._pass_over)
            self._sink.made(index)

        return made

    def _pass_over(self) -> None:
        self._in_pass = False
        self._sink.pass_over()


def with_mean_loss(
    closure: Callable[[], Any], after: Callable[[], None], mean: Callable[[Tensor], Tensor]
) -> Callable[[], Any]:
    """Optimizers that ask for the loss (LBFGS) must hear the same one on every worker.

    `after` is called when the closure has made its gradients.
    """

    def evaluate() -> Any:
        loss = closure()
        after()
        value = loss if isinstance(loss, Tensor) else torch.tensor(float(loss))
        return mean(value.detach())

    return evaluate


StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


def with_closure(
    wrap: Callable[[Callable[[], Any]], Callable[[], Any]],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> StepArguments | None:
    """The arguments of `optimizer.step(closure)` with the closure wrapped; None without one.

    `arguments` are those a hook before the step gets: the optimizer itself comes first.
    """
    if callable(named.get("closure")):
        return arguments, {**named, "closure": wrap(named["closure"])}
    if len(arguments) > 1 and callable(arguments[1]):
        return (arguments[0], wrap(arguments[1]), *arguments[2:]), named
    return None
