"""The calls of a model, seen by the clock: mixed into the model, so that the loop stays as it was.

A script that never calls its model as a whole (`model.encode(x)`) trains as well; its forward time
then counts as other work, and its samples are those that its sharded loader handed out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.telemetry import EVALUATION, StepClock


class Passes:
    """The forward passes of one model: their time and their samples."""

    def __init__(self, clock: StepClock, counts: Callable[[], bool]) -> None:
        """`counts`: whether the samples given now belong to the batch; a stand-in does not."""
        self.clock, self._counts = clock, counts
        self.samples = 0
        """Samples of the training passes since the last step: the length of the first tensor."""

        self.trains_in_evaluation = False
        """The script trains a model that is in evaluation mode: on purpose, to keep the statistics
        of batch norm, or because `model.train()` was forgotten."""
        self._evaluated = 0
        self.is_called = False
        """The model was called as a whole at least once; otherwise no samples are seen here."""

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
        """Return the samples of the step that ends, with the model in this mode."""
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


class SampleCount:
    """Samples that this worker trains on: in all, and in the current step."""

    def __init__(self) -> None:
        self.passes: list[Passes] = []
        """Passes of each model that is distributed."""

        self._trained = self._handed = 0

    @property
    def last(self) -> Passes:
        """The passes of the model that was distributed last."""
        return self.passes[-1]

    @property
    def total(self) -> int:
        """Samples so far, those of the current step included."""
        return self._trained + self.in_step

    @property
    def in_step(self) -> int:
        """Samples of the current step so far."""
        if not self.passes:
            return 0
        is_seen = self.last.is_called or self._trained == 0
        return self.last.samples if is_seen else self._handed

    def hand(self, count: int) -> None:
        """A loader hands a batch of `count` samples to the script, to train on."""
        self._handed += count

    def end_step(self, *, is_training: bool) -> int:
        """Return the samples of the step that ends."""
        count = self.last.take_samples(is_training=is_training)
        count = count if self.last.is_called else self._handed
        self._trained += count
        self._handed = 0
        self.forget_step()
        return count

    def forget_step(self) -> None:
        """Count the samples of the current step anew."""
        for passes in self.passes:
            passes.samples = 0


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
