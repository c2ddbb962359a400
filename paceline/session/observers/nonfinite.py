"""Values that are not finite: the worker whose loss or gradient was the first, and its step.

Averaging spreads a bad gradient to every worker within a step, and then its origin is unknown. So
each worker looks at its own gradient of one small tensor before it is averaged. The tensor is near
the input, where backward arrives last and carries along what went wrong above. The sum is read when
the step is written, one step later, so that a GPU is not waited for.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

LARGEST_ELEMENTS = 1 << 18
"""Size of a tensor that is looked at in every step, at most: more would cost time."""


class NonfiniteValues:
    """Looks for values that are not finite in the steps of one worker."""

    def __init__(self) -> None:
        self.watched: Tensor | None = None
        """The tensor whose gradients are looked at."""
        self._seen: Tensor | None = None
        self._has_complained = self._is_paused = False

    def watch(self, trained: Sequence[Tensor]) -> None:
        """Look at the gradients of one of these from now on."""
        for tensor in trained:
            # A tensor that is no parameter warns when it is saved with a hook on it.
            if isinstance(tensor, torch.nn.Parameter) and tensor.numel() <= LARGEST_ELEMENTS:
                self.watched = tensor
                tensor.register_hook(self.look)
                return

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the gradients made inside: they belong to no step."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def take(self) -> Tensor | None:
        """Return the sum of the gradients of this step; None where there were none."""
        seen, self._seen = self._seen, None
        return None if seen is None else seen.to("cpu", non_blocking=True)

    def complaint(self, member: str, step: int, loss: float | None, seen: Tensor | None) -> str:
        """Return a sentence about the first step that went wrong; empty for all others."""
        if self._has_complained:
            return ""
        total = 0.0 if seen is None else float(seen)
        if loss is not None and not math.isfinite(loss):
            what = f"the loss of {member} is {loss}"
        elif not math.isfinite(total):
            what = f"a gradient of {member} is not finite"
        else:
            return ""
        self._has_complained = True
        return f"{what} at step {step}; from there on nothing is learnt."

    def look(self, gradient: Tensor | None) -> None:
        """Add up a gradient of the watched tensor; called by autograd, or where it is replayed.

        Autograd calls with None where an operation on the weight (`replicated` makes one of all
        replicas) found that it has no part in the loss.
        """
        if self._is_paused or gradient is None or gradient.layout is not torch.strided:
            return
        total = gradient.detach().sum(dtype=torch.float32)
        self._seen = total if self._seen is None else self._seen + total
