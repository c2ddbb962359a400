"""What servers that update can take over from a script: its tensors, and an optimizer they can run.

Whatever they cannot take over is refused when the script calls `distribute`.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from paceline import spec
from paceline.autograd.trained import Trained, groups_of
from paceline.errors import SpecError
from paceline.served.shapes import Exchanged
from paceline.served.updates import ELEMENTWISE, is_elementwise_state, server_class, settings_of
from paceline.served.weights import is_known_elsewhere, is_viewed


def where_and_fix(options: spec.Server) -> tuple[str, str]:
    """Where a refusal comes from, and the option by which every script trains."""
    fix = "write update=worker" if options.exclusive else "write mode=sync"
    return f"architecture server:mode={options.mode}", fix


def served_part(trained: Trained, options: spec.Server, *, is_script: bool) -> Exchanged:
    """Return the tensors that servers update, and the optimizer that they run.

    Raises SpecError for what they cannot serve. `is_script`: the caller may hold weights in ways
    that a built-in loop does not.
    """
    where, fix = where_and_fix(options)
    optimizer, kind = trained.optimizers[0], server_class(trained.optimizers[0])
    if len(trained.optimizers) > 1:
        problem = f"{len(trained.optimizers)} optimizers train one model."
        raise SpecError(where, problem, f"use one with several groups, or {fix}.")
    if not kind:
        name, known = type(optimizer).__name__, ", ".join(ELEMENTWISE)
        problem = f"the optimizer runs on servers, part by part, and {name} cannot."
        raise SpecError(where, problem, f"{fix}, or use one of {known}.")
    lacking = set(trained.without_optimizer())
    if lacking and options.exclusive:
        problem = f"{min(lacking)} is in no optimizer, and servers update by optimizers."
        raise SpecError(where, problem, f"give it to the optimizer, or {fix}.")
    named = [(name, tensor) for name, tensor in trained.named if name not in lacking]
    tensors = [tensor for _, tensor in named]
    if any(_has_other_state(optimizer, tensor) for tensor in tensors):
        problem = "the optimizer's state is of another type than its weights."
        raise SpecError(where, problem, f"{fix}.")
    if is_script and (problem := _held_elsewhere(tensors)):
        raise SpecError(where, problem, f"{fix}, or train copies of them.")
    group_of = groups_of(optimizer)
    return Exchanged(
        names=[name for name, _ in named],
        tensors=tensors,
        groups=[group_of[id(tensor)] for tensor in tensors],
        optimizer=kind,
        settings=settings_of(optimizer),
    )


def _has_other_state(optimizer: Optimizer, tensor: Tensor) -> bool:
    """As after `model.double()`: state travels as values of its tensor's type."""
    state, size = optimizer.state.get(tensor, {}), tensor.numel()
    kept = [value for name, value in state.items() if is_elementwise_state(name, value, size)]
    return any(value.dtype != tensor.dtype for value in kept)


def _held_elsewhere(tensors: Sequence[Tensor]) -> str:
    """Why the script would not see its weights change; empty if it would."""
    if any(map(is_known_elsewhere, tensors)):
        return "weights lie in an array or in shared memory, where none would see them change."
    if any(map(is_viewed, tensors)):
        return "the script holds views of its weights, where it would not see them change."
    return ""
