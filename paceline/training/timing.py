"""The model's own calls, seen by the clock: mixed into the model, so that the loop stays as it was.

A script that never calls its model as a whole (`model.encode(x)`) trains as well; its forward time
then counts as other work.
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

    def begin(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.clock.enter("forward")
        values = (*arguments, *named.values())
        first = next((value for value in values if isinstance(value, Tensor)), None)
        if first is not None and first.ndim and self._counts():
            self.samples += first.shape[0]

    def end(self) -> None:
        self.clock.enter("backward")


class Timed(torch.nn.Module):
    """Mixed into the model; a compiled graph goes through unseen."""

    _paceline_passes: Passes

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        passes = type(self)._paceline_passes
        if torch.compiler.is_compiling():
            return super().__call__(*arguments, **named)
        if not (self.training and torch.is_grad_enabled()):
            passes.clock.enter(EVALUATION)
            return super().__call__(*arguments, **named)
        passes.begin(arguments, named)
        output = super().__call__(*arguments, **named)
        passes.end()
        return output
