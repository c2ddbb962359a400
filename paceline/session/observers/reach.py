"""Reach of training into a model: what is frozen, what gets no gradient, what does not move.

A graph that is cut (`detach`, `no_grad`, a tensor made anew), gradients that are clipped to nothing
or never cleared train something else than was meant, and say nothing. Looked at in the first two
steps, and once more in step 60.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.autograd.trained import Trained

LOOKED_STEPS = 2
MOVED_STEPS = 60
"""Number of steps after which weights must have moved."""

MOST_TOLD = 64
"""Tensors whose own movement is recorded."""

SAMPLED = 1024
"""Elements of each tensor that are watched for moving."""

Elements = Mapping[str, int]


class Reach:
    """Which tensors a backward pass brings gradients to, and whether they move by them."""

    def __init__(self) -> None:
        self._reached: set[int] = set()
        self._alive: set[int] = set()
        """Tensors whose gradient was not zero."""

        self._handles: list[RemovableHandle] = []
        self._samples: list[tuple[str, Tensor, Tensor]] = []
        self._has_stepped = self._is_uncleared = False
        self._first_made: Tensor
        self.counts: dict[str, object] = {}
        """Elements in all, those that are frozen and those without a gradient, and a name of
        these; whether gradients of the step before were still there when the next came; by how
        much of their size weights moved. Empty where nothing is known."""

    def watch(self, trained: Trained) -> None:
        parameters = [t for t in trained.tensors if isinstance(t, torch.nn.Parameter)]
        for tensor in parameters:
            self._handles.append(tensor.register_post_accumulate_grad_hook(self._note))
        if parameters:
            self._first_made = parameters[-1]
            self._handles.append(self._first_made.register_hook(self.look_before))

    def after(self, step: int, trained: Sequence[Trained]) -> None:
        """A step is over."""
        self._has_stepped = True
        if step + 1 >= LOOKED_STEPS and self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            if self._reached:  # else gradients do not come from autograd
                self._count(trained)
                named = [pair for one in trained for pair in one.named if _has_numbers(pair[1])]
                self._samples = [(name, tensor, _sample(tensor)) for name, tensor in named]
        if step + 1 >= MOVED_STEPS and self._samples:
            self._count_moves()
            self._samples.clear()

    def _note(self, tensor: Tensor) -> None:
        self._reached.add(id(tensor))
        # A gradient that an exchange has taken, or stands in for, is not looked at: it may be gone.
        grad = tensor.grad
        if grad is None or type(grad) is not Tensor or id(tensor) in self._alive or grad.any():
            self._alive.add(id(tensor))

    def look_before(self, _: Tensor) -> None:
        """The second step's first gradient is about to be added to what is there."""
        if self._has_stepped:
            self._has_stepped, there = False, self._first_made.grad
            self._is_uncleared = there is not None and bool(there.any())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While passes are recorded their gradients are no step's; replays call no hooks."""
        before, self._has_stepped = self._has_stepped, False
        try:
            yield
        finally:
            self._has_stepped = before

    def _count(self, trained: Sequence[Trained]) -> None:
        parameters = [pair for one in trained for pair in one.model.named_parameters()]
        frozen = [(name, p) for name, p in parameters if not p.requires_grad]
        lacking = [
            (name, p) for name, p in parameters if p.requires_grad and id(p) not in self._reached
        ]
        named = dict(parameters)
        left = [name for one in trained for name in one.without_optimizer()]
        loose = [(name, named[name]) for name in left if name in named]
        zero = [(n, p) for n, p in parameters if id(p) in self._reached - self._alive]
        self.tell(_elements(parameters), _elements(frozen), _elements(lacking))
        self.counts["uncleared"] = self._is_uncleared
        tensors = [tensor for one in trained for tensor in one.tensors]
        self.counts["trained_bytes"] = sum(t.numel() * t.element_size() for t in tensors)
        examples: dict[str, str] = {}
        for why, found in (("without_optimizer", loose), ("zero_gradient", zero)):
            if found:
                self.counts[why] = sum(tensor.numel() for _, tensor in found)
                examples[why] = found[0][0]
        if examples:
            self.counts["examples"] = examples

    @torch.no_grad()
    def _count_moves(self) -> None:
        """By how much of their size weights moved: all together, and each of the first tensors."""
        moves = {name: _move(_sample(tensor), before) for name, tensor, before in self._samples}
        moved, size = (sum(move[place] for move in moves.values()) for place in (0, 1))
        self.counts["moved"] = float((moved / max(size, 1e-30)) ** 0.5)
        self.counts["moved_by_tensor"] = {
            name: float((own / max(before, 1e-30)) ** 0.5)
            for name, (own, before) in list(moves.items())[:MOST_TOLD]
        }

    def tell(self, all_of_them: Elements, frozen: Elements, lacking: Elements) -> None:
        """Elements of each weight by name: of all, of those frozen, of those without gradient."""
        self.counts = {
            "elements": sum(all_of_them.values()),
            "frozen": sum(frozen.values()),
            "without_gradient": sum(lacking.values()),
            "for_example": next(iter({**lacking, **frozen}), ""),
        }


def _move(now: Tensor, before: Tensor) -> tuple[float, float]:
    """The squared distance between two samples, and the squared size of the first."""
    return float((now - before).square().sum()), float(before.square().sum())


def _elements(named: Sequence[tuple[str, Tensor]]) -> Elements:
    return {name: tensor.numel() for name, tensor in named}


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_floating_point()


def _sample(tensor: Tensor) -> Tensor:
    """A copy of its first elements as they are: new values on their way are not waited for."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().flatten()[:SAMPLED].to("cpu", torch.float64, copy=True)
