"""The model's own calls, seen by the clock: mixed into the model, so that the loop stays as it was.

A script that never calls its model as a whole (`model.encode(x)`) trains as well; its forward time
then counts as other work, and its samples are those that its sharded loader handed out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.telemetry import EVALUATION, StepClock


class Passes:
    """What the forward passes of one model tell the clock."""

    def __init__(self, clock: StepClock, counts: Callable[[], bool]) -> None:
        """`counts`: whether the samples given now belong to the batch; a stand-in does not."""
        self.clock, self._counts = clock, counts
        self.samples = 0
        """Of the training passes since the last step: the length of the first tensor given."""

        self.trains_in_evaluation = False
        """The script trains a model that is in evaluation mode: on purpose, to keep the statistics
        of batch norm, or because `model.train()` was forgotten."""
        self._evaluated = 0
        self.is_called = False
        """As a whole, ever; else it tells of no samples."""

    def begin(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.clock.enter("forward")
        self.is_called = True
        self.samples += self._length(arguments, named)

    def end(self) -> None:
        self.clock.enter("backward")

    def evaluate(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A pass in evaluation mode begins; if the optimizer steps on it, it was training."""
        self.clock.enter(EVALUATION)
        self.is_called = True
        self._evaluated = self._length(arguments, named) if torch.is_grad_enabled() else 0

    def take_samples(self, *, is_training: bool) -> int:
        """Those of the step that ends, with the model in this mode."""
        samples, evaluated = self.samples, self._evaluated
        self.samples = self._evaluated = 0
        if not samples and evaluated and not is_training:
            self.trains_in_evaluation = True
            return evaluated
        return samples

    def _length(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
        values = (*arguments, *named.values())
        first = next((value for value in values if isinstance(value, Tensor)), None)
        return first.shape[0] if first is not None and first.ndim and self._counts() else 0


class Timed(torch.nn.Module):
    """Mixed into the model; a compiled graph goes through unseen."""

    _paceline_passes: Passes

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        passes = type(self)._paceline_passes
        if torch.compiler.is_compiling():
            return super().__call__(*arguments, **named)
        passes.trains_in_evaluation &= not self.training
        trains = self.training or passes.trains_in_evaluation
        if not (trains and torch.is_grad_enabled()):
            passes.evaluate(arguments, named)
            return super().__call__(*arguments, **named)
        passes.begin(arguments, named)
        output = super().__call__(*arguments, **named)
        passes.end()
        return output
