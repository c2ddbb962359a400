"""What one call of `distribute` trains: found anew at each step, because scripts change it.

A script may unfreeze layers, add groups to an optimizer, or learn a tensor that is no part of any
module. Whatever wants a gradient and belongs to the model or to one of its optimizers is trained.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.errors import SpecError

Named = list[tuple[str, Tensor]]
_Found = tuple[int, torch.Size, torch.dtype, tuple[int, int] | None]
"""Which tensor it is, how its numbers lie, and the optimizer and group that it is in."""

_Outline = tuple[list[bool], list[int]]
"""Of all that could be trained, what is; and how many tensors each group of an optimizer has."""


def groups_of(optimizer: Optimizer) -> dict[int, int]:
    """Identity of a tensor -> its group in the optimizer."""
    groups = enumerate(optimizer.param_groups)
    return {id(tensor): number for number, group in groups for tensor in group["params"]}


def require_trainable(named: Iterable[tuple[str, Tensor]]) -> None:
    """SpecError where none of these can be trained, or one has no shape yet."""
    tensors = list(named)
    for name, tensor in tensors:
        _require_shape(name, tensor)
    if not any(tensor.requires_grad for _, tensor in tensors):
        fix = "pass a model with parameters that require gradients."
        raise SpecError("distribute", "the model has nothing to train.", fix)


def _require_shape(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        fix = "run one batch through the model before paceline.distribute."
        raise SpecError("distribute", f"{name} has no shape yet.", fix)


def refuse_max_norm(model: torch.nn.Module, workers: int) -> None:
    """SpecError where a layer rewrites its weights as it reads them: only the rows of the samples
    that come, so that those of several workers become different."""
    for name, layer in model.named_modules() if workers > 1 else ():
        rewrites = isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if rewrites and layer.max_norm is not None:
            problem = (
                f"{name or 'the model'} has max_norm={layer.max_norm}, by which each worker would "
                "rewrite the rows of its own samples."
            )
            fix = (
                "build it without, and after optimizer.step(), under torch.no_grad(), call "
                f"weight.renorm_({layer.norm_type}, 0, {layer.max_norm}) on its weight."
            )
            raise SpecError("distribute", problem, fix)


class Trained:
    """A model and the optimizers that train it, as every architecture sees them."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self.named: Named = []
        """The tensors trained at present: the model's in order of definition, then the rest."""
        self._found: list[_Found] = []
        self._looked_at: list[Tensor] = []
        self._outline: _Outline = ([], [])
        self.update()
        require_trainable(self.named)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self.named]

    @property
    def device(self) -> torch.device:
        return self.named[0][1].device

    def update(self) -> bool:
        """Look again; True when something else is trained now, or by other numbers (`double()`).

        Where all is frozen for a while what was trained before still counts, without gradients: an
        exchange need not be opened for nothing, nor again afterwards."""
        group_of = {
            tensor: (number, place)
            for number, optimizer in enumerate(self.optimizers)
            for tensor, place in groups_of(optimizer).items()
        }
        with torch._C.DisableTorchFunctionSubclass():
            listed = list(self._all())
            named = [(name, tensor) for name, tensor in listed if tensor.requires_grad]
            self._looked_at = [tensor for _, tensor in listed]
            self._outline = self._draw()
            found = [(id(t), t.shape, t.dtype, group_of.get(id(t))) for _, t in named]
        if not found or found == self._found:
            return False
        self.named, self._found = named, found
        return True

    @property
    def may_be_other(self) -> bool:
        """Something was frozen, unfrozen or given to an optimizer since the last `update`: a quick
        look, for every backward pass."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._draw() != self._outline

    def _draw(self) -> "_Outline":
        sizes = [
            len(group["params"])
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        return [tensor.requires_grad for tensor in self._looked_at], sizes

    def everything(self) -> list[Tensor]:
        """All numbers a worker starts from: trained or not, and the model's buffers."""
        return [*(tensor for _, tensor in self._all()), *self.model.buffers()]

    def without_optimizer(self) -> list[str]:
        """Names of trained tensors that no optimizer updates."""
        updated = {tensor for optimizer in self.optimizers for tensor in groups_of(optimizer)}
        return [name for name, tensor in self.named if id(tensor) not in updated]

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for name, tensor in self._listed():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def _listed(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            _require_shape(name, parameter)
            yield name, parameter
        for number, optimizer in enumerate(self.optimizers):
            for place, group in enumerate(optimizer.param_groups):
                for index, tensor in enumerate(group["params"]):
                    yield f"optimizer{number}.group{place}.{index}", tensor
