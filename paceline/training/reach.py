"""How much of a model its training reaches: what is frozen, and what no gradient comes to.

A graph that is cut (`detach`, `no_grad`, a tensor made anew) trains what lies behind the cut and
says nothing. Looked at in the first two steps only.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.architectures.trained import Trained

LOOKED_STEPS = 2

Elements = Mapping[str, int]


class Reach:
    """Which tensors a backward pass brings gradients to."""

    def __init__(self) -> None:
        self._reached: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self.counts: dict[str, object] = {}
        """Elements in all, those that are frozen and those without a gradient, and a name of
        these; empty where nothing is known."""

    def watch(self, trained: Trained) -> None:
        for tensor in trained.tensors:
            if isinstance(tensor, torch.nn.Parameter):
                self._handles.append(tensor.register_post_accumulate_grad_hook(self._note))

    def after(self, step: int, trained: Sequence[Trained]) -> None:
        """A step is over: with the last that is looked at, count."""
        if step + 1 < LOOKED_STEPS or not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._reached:  # else gradients do not come from autograd
            self._count(trained)

    def _note(self, tensor: Tensor) -> None:
        self._reached.add(id(tensor))

    def _count(self, trained: Sequence[Trained]) -> None:
        parameters = [pair for one in trained for pair in one.model.named_parameters()]
        frozen = [(name, p) for name, p in parameters if not p.requires_grad]
        lacking = [
            (name, p) for name, p in parameters if p.requires_grad and id(p) not in self._reached
        ]
        self.tell(_elements(parameters), _elements(frozen), _elements(lacking))

    def tell(self, all_of_them: Elements, frozen: Elements, lacking: Elements) -> None:
        """Elements of each weight by name: of all, of those frozen, of those without gradient."""
        self.counts = {
            "elements": sum(all_of_them.values()),
            "frozen": sum(frozen.values()),
            "without_gradient": sum(lacking.values()),
            "for_example": next(iter({**lacking, **frozen}), ""),
        }


def _elements(named: Sequence[tuple[str, Tensor]]) -> Elements:
    return {name: tensor.numel() for name, tensor in named}
