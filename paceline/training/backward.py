"""What a session does before each backward pass of a script. A compiled one goes through unseen."""

from collections.abc import Callable
from typing import Any

import torch


def before_backward(do: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Have `do` called with the tensors that a pass starts from, and with their gradients where
    the script gives any; returns what ends it."""
    module: Any = torch.autograd
    original = module.backward

    def backward(tensors: Any, grad_tensors: Any = None, *rest: Any, **named: Any) -> None:
        if not torch.compiler.is_compiling():
            do(tensors, grad_tensors)
        original(tensors, grad_tensors, *rest, **named)

    def end() -> None:
        if module.backward is backward:  # else somebody stands in between, and calls it
            module.backward = original

    module.backward = backward
    return end
