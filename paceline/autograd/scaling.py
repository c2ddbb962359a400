"""Gradients of what a session trains, as they come: counted, and weighted by the samples behind.

A worker whose part of a batch is larger or smaller than an equal one has gradients that count more
or less; what its loader handed out says how much (`handing.py`, `sharding.py`).
"""

from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor

from paceline.autograd.gradients import renew_hooks
from paceline.autograd.trained import Trained
from paceline.errors import PacelineError, SpecError


class ScaledGradients:
    """Of one worker. Nothing is hooked until something is to be counted, scaled or refused."""

    def __init__(
        self, trained: Iterable[Trained], remember: Callable[[PacelineError], None]
    ) -> None:
        """`trained` grows with the calls of `distribute`; `remember` hears what was refused."""
        self._trained, self._remember = trained, remember
        self.scale = 1.0
        """What this worker's gradients count at present, an equal share being 1."""
        self.count = 0
        """How many came so far, of those that are watched: they tell which batches are trained
        on."""
        self._refusal: SpecError | None = None
        self._watches = False
        self._insides: dict[int, int] = {}
        """For each watched tensor, by identity, what it consisted of when it was hooked."""

    def scale_by(self, scale: float) -> None:
        """The next gradients count `scale` times an equal share."""
        self.scale, self._refusal = scale, None
        if scale != 1.0:
            self.watch()

    def refuse(self, error: SpecError) -> None:
        """Gradients that come before the next `scale_by` raise `error`."""
        self._refusal = error
        self.watch()

    def watch(self) -> None:
        """Count and scale the gradients of all that is trained, from now on."""
        self._watches = True
        self.watch_more()

    def watch_more(self) -> None:
        """The script may train more than before: look at that too, if at anything.

        Called before each backward pass too: what is unfrozen for a batch that was handed out
        already counts as much as the rest of it.
        """
        if not self._watches:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in chain.from_iterable(one.everything() for one in self._trained):
                if tensor.requires_grad and not self._is_watched(tensor):
                    tensor.register_hook(self._came)
                    self._insides[id(tensor)] = tensor._cdata

    def _is_watched(self, tensor: Tensor) -> bool:
        """Asked of the tensor itself: hooks go with its inside when a script swaps it."""
        if self._came not in (tensor._backward_hooks or {}).values():
            return False
        is_same = self._insides.get(id(tensor)) == tensor._cdata
        if not is_same:
            renew_hooks(tensor)
        return is_same

    def _came(self, gradient: Tensor) -> Tensor:
        self.count += 1
        if self._refusal is not None:
            self._remember(self._refusal)
            raise self._refusal
        if self.scale == 0.0:  # what is not a number stays so when it is multiplied by zero
            return torch.zeros_like(gradient)
        return gradient if self.scale == 1.0 else gradient * self.scale
