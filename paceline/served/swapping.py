"""What becomes of tensors that a script swaps: `torch.utils.swap_tensors`, and `load_state_dict`
where `torch.__future__.set_swap_module_params_on_conversion` is set.

A tensor stays the object that it is and gets another's inside. Weights that servers hold are the
script's again before that. Hooks go with the old inside, but torch leaves the dictionaries that
tell of them: they are brought to where the hooks are, so whoever looks for his own misses them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.served.weights import give_up


def follow_swaps() -> Callable[[], None]:
    """From now on, in the whole process; returns what ends it."""
    module: Any = torch._C
    original = module._swap_tensor_impl

    def swap(first: Tensor, second: Tensor) -> None:
        for tensor in (first, second):
            give_up(tensor)
        original(first, second)
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            mine, yours = getattr(first, hooks), getattr(second, hooks)
            setattr(first, hooks, yours)
            setattr(second, hooks, mine)

    def end() -> None:
        if module._swap_tensor_impl is swap:
            module._swap_tensor_impl = original

    module._swap_tensor_impl = swap
    return end
