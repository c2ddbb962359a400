"""What a session does around each backward pass of a script. A compiled one goes through unseen."""

from collections.abc import Callable
from typing import Any

import torch


def before_backward(do: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Have `do` called with the tensors that a pass starts from, and with their gradients where
    the script gives any; returns what ends it."""

    def around(original: Any, tensors: Any, grad_tensors: Any, rest: Any, named: Any) -> None:
        do(tensors, grad_tensors)
        original(tensors, grad_tensors, *rest, **named)

    return _replace(around)


def after_backward(do: Callable[[Exception | None], None]) -> Callable[[], None]:
    """Have `do` called when a pass has ended, with what it raised; returns what ends it. A pass
    inside another one is a part of that."""

    def around(original: Any, tensors: Any, grad_tensors: Any, rest: Any, named: Any) -> None:
        try:
            original(tensors, grad_tensors, *rest, **named)
        except Exception as error:
            ended(error)
            raise
        ended(None)

    def ended(raised: Exception | None) -> None:
        if torch._C._current_graph_task_id() == NO_PASS:
            do(raised)

    return _replace(around)


NO_PASS = -1
"""The number of the pass where autograd is in none."""


def _replace(around: Callable[..., None]) -> Callable[[], None]:
    module: Any = torch.autograd
    original = module.backward

    def backward(tensors: Any, grad_tensors: Any = None, *rest: Any, **named: Any) -> None:
        if torch.compiler.is_compiling():
            original(tensors, grad_tensors, *rest, **named)
        else:
            around(original, tensors, grad_tensors, rest, named)

    def end() -> None:
        if module.backward is backward:  # else somebody stands in between, and calls it
            module.backward = original

    module.backward = backward
    return end
