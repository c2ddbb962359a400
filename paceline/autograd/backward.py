"""What a session does around each backward pass of a script."""

from collections.abc import Callable
from typing import Any

import torch

from paceline.autograd.gradients import uncompiled

NO_PASS = -1
"""The number of the pass where autograd is in none."""


class AroundBackward:
    """Of one worker."""

    def __init__(self) -> None:
        self.before: list[Callable[[Any, Any], None]] = []
        """Called with the tensors that a pass starts from, and with their gradients where the
        script gives any."""
        self.after: list[Callable[[Exception | None], None]] = []
        """Called when a pass has ended, with what it raised. A pass inside another one is a part
        of that."""

    def watch(self) -> Callable[[], None]:
        """See the passes from now on, if anybody asked to; returns what ends it."""
        if not self.before and not self.after:
            return lambda: None
        module: Any = torch.autograd
        original = module.backward

        def backward(tensors: Any, grad_tensors: Any = None, *rest: Any, **named: Any) -> None:
            for do in self.before:
                do(tensors, grad_tensors)
            try:
                original(tensors, grad_tensors, *rest, **named)
            except Exception as error:
                self._ended(error)
                raise
            self._ended(None)

        watched = uncompiled(backward)

        def end() -> None:
            if module.backward is watched:  # else somebody stands in between, and calls it
                module.backward = original

        module.backward = watched
        return end

    def _ended(self, raised: Exception | None) -> None:
        if torch._C._current_graph_task_id() == NO_PASS:
            for do in self.after:
                do(raised)
