"""The loss of a script that reports none: what it calls `backward()` on.

Whether a run learns is half of what there is to say of it, and few scripts report a loss. So what
backward passes start from is kept while a script trains one model: on a GPU as a copy that is under
way, read when the step is written. `paceline.report_loss` says it better, and wins.

Not seen: what is compiled or captured into a graph, gradients by `torch.autograd.grad`, and scripts
with several models or losses that take turns, where no one value is the loss.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.autograd.trained import Trained
from paceline.record import RunFolder

FACTORS = ("MulBackward0", "DivBackward0")
"""Last operations of a loss that is divided by the number of passes it is accumulated over."""


class SeenLoss:
    """The loss of one worker's current step."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._is_part = False
        """Passes bring parts of one loss, which they add up to."""

        self.count = 0
        """Steps whose loss was found here."""

    @staticmethod
    def is_wanted(folder: RunFolder | None) -> bool:
        """Return whether to look at what a script's backward passes start from; a built-in workload
        reports its loss."""
        return folder is not None and folder.experiment().workload.script is not None

    def forget(self) -> None:
        """The step is made again."""
        self._values = []

    def unless(
        self, reported: Tensor | None, trained: Sequence[Trained]
    ) -> "Tensor | StepLoss | None":
        """The loss of the step that ends: what the script reported, or else what was seen.

        Where several optimizers take turns, each has a loss of its own, and none is the run's.
        """
        one = len(trained) == 1
        one = one and (len(trained[0].optimizers) == 1 or len(self._values) == 1)
        if reported is not None or not one:
            self.forget()
            return reported
        return self.take()

    def take(self) -> "StepLoss | None":
        """What was seen since the last call; None where it was nothing."""
        values, self._values = self._values, []
        if not values:
            return None
        self.count += 1
        return StepLoss(values, self._is_part)

    def look(self, roots: Any, gradients: Any) -> None:
        """A backward pass starts from `roots`."""
        if gradients is not None:
            return
        try:
            with torch._C.DisableTorchFunctionSubclass():
                for root in [roots] if isinstance(roots, Tensor) else roots:
                    self._values += self._value(root)
        except Exception:  # an odd tensor must cost its loss, never a script its pass
            self._values = []

    def _value(self, root: Tensor) -> Iterator[Tensor]:
        if root.numel() != 1 or not root.is_floating_point():
            return
        if root.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        value, last = root.detach(), root.grad_fn
        name = "" if last is None else last.name()
        if last is not None and name == "MulBackward0":
            scale = getattr(last, "_saved_other", None)
            if isinstance(scale, Tensor) and scale.ndim == 0 and scale.dtype is torch.float32:
                # A gradient scaler's; numbers that a script writes out are float64.
                value, before = value / scale, last.next_functions[0][0]
                name = "" if before is None else before.name()
        self._is_part = name in FACTORS
        # A copy: the script may add others to its loss, or to where it lies.
        yield value.to("cpu", non_blocking=True) if value.is_cuda else value.clone()


class StepLoss:
    """The loss of one step, read when it no longer stalls a GPU."""

    def __init__(self, values: list[Tensor], is_part: bool) -> None:
        self._values, self._is_part = values, is_part

    def __float__(self) -> float:
        total = sum(float(value) for value in self._values)
        return total if self._is_part else total / len(self._values)
