"""Numbers that are wrong: whose loss or gradient was the first that is infinite or not a number.

Averaging spreads a bad gradient to every worker within a step, and then nobody can tell whose it
was. So each worker looks at its own, before it is averaged: at one small tensor near the input,
where backward comes last and brings along whatever went wrong above. It is read when the step is
written, one step later, so that a GPU is not waited for.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

LARGEST_ELEMENTS = 1 << 18
"""Of a tensor that is looked at in every step: more would cost time."""


class Numbers:
    """What one worker's steps came to."""

    def __init__(self) -> None:
        self.watched: Tensor | None = None
        """Whose gradients are looked at."""
        self._seen: Tensor | None = None
        self._is_told = self._is_paused = False

    def watch(self, trained: Sequence[Tensor]) -> None:
        """Look at the gradients of one of these from now on."""
        for tensor in trained:
            # What is no parameter warns when it is saved with a hook on it.
            if isinstance(tensor, torch.nn.Parameter) and tensor.numel() <= LARGEST_ELEMENTS:
                self.watched = tensor
                tensor.register_hook(self.look)
                return

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients made inside are of no step."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def take(self) -> Tensor | None:
        """What the gradients of this step add up to; None where none came."""
        seen, self._seen = self._seen, None
        return None if seen is None else seen.to("cpu", non_blocking=True)

    def complaint(self, member: str, step: int, loss: float | None, seen: Tensor | None) -> str:
        """A sentence about the first step that went wrong; empty for all others."""
        if self._is_told:
            return ""
        total = 0.0 if seen is None else float(seen)
        if loss is not None and not math.isfinite(loss):
            what = f"the loss of {member} is {loss}"
        elif not math.isfinite(total):
            what = f"a gradient of {member} is not finite"
        else:
            return ""
        self._is_told = True
        return f"{what} at step {step}; from there on nothing is learnt."

    def look(self, gradient: Tensor | None) -> None:
        """A gradient of what is watched is made; called by autograd, or where it is replayed.

        Autograd calls with None where an operation on the weight (`replicated` makes one of all
        replicas) found that it has no part in the loss.
        """
        if self._is_paused or gradient is None or gradient.layout is not torch.strided:
            return
        total = gradient.detach().sum(dtype=torch.float32)
        self._seen = total if self._seen is None else self._seen + total
