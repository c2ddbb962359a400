"""The calls of a script. `init` says who this process is; the others use its session."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.architectures.base import Architecture
from paceline.errors import SpecError
from paceline.session.start import current

Model = TypeVar("Model", bound=torch.nn.Module)
First = TypeVar("First", bound=Optimizer)
Second = TypeVar("Second", bound=Optimizer)


@overload
def distribute(model: Model, optimizer: First, /) -> tuple[Model, First]: ...


@overload
def distribute(
    model: Model, optimizer: First, another: Second, /
) -> tuple[Model, First, Second]: ...


@overload
def distribute(model: Model, /, *optimizers: Optimizer) -> tuple[Any, ...]: ...


def distribute(model: torch.nn.Module, /, *optimizers: Optimizer) -> tuple[Any, ...]:
    """Return the model and the optimizers, trained over all workers from here on.

    They are the same objects as before; all workers start from worker 0's numbers. Call it once for
    each model, with every optimizer that trains it.
    """
    return current().distribute(model, *optimizers)


@contextmanager
def no_sync() -> Iterator[None]:
    """Backward passes inside only accumulate gradients; the first one outside exchanges them."""
    with ExitStack() as stack:
        for architecture in _architectures():
            stack.enter_context(architecture.no_sync())
        yield


def clip_grad_norm_(max_norm: float, model: torch.nn.Module | None = None) -> Tensor:
    """Bound the norm of the averaged gradient of `model`; returns the norm before.

    Call it between backward and `optimizer.step()`. `model` may be left out when there is one.
    """
    return _architecture_of(model).clip(max_norm)


def report_loss(loss: Tensor | float) -> None:
    """Put this worker's loss of the current step into the record."""
    current().report_loss(loss)


def settle() -> None:
    """Bring the weights to rest: after it every worker holds the same model, whole.

    Every worker calls it at the same point. With `average` it averages at once; buffers (the
    statistics of batch norm) become worker 0's. In asynchronous modes each worker has its newest
    weights, which differ.
    """
    for architecture in _architectures():
        architecture.settle()


def mean(value: Tensor | float) -> Tensor | float:
    """The mean of a number or a tensor over the workers; every worker calls it."""
    session = current()
    if isinstance(value, Tensor):
        return session.group.mean(value)
    return float(session.group.mean(torch.tensor(float(value), dtype=torch.float64)))


def barrier() -> None:
    """Return when every worker has called it."""
    current().group.mean(torch.zeros(1))


def rank() -> int:
    """This worker's number, from 0."""
    return current().rank


def workers() -> int:
    """Return the number of workers that began the job; one that failed still counts."""
    return current().workers


def is_main() -> bool:
    """Return whether this worker does what is done once for all: printing, saving."""
    return current().participants.is_speaker


def _architectures() -> list[Architecture]:
    architectures = current().distribution.architectures
    if not architectures:
        fix = "call paceline.distribute(model, optimizer) first."
        raise SpecError("paceline", "there is no distributed model yet.", fix)
    return architectures


def _architecture_of(model: torch.nn.Module | None) -> Architecture:
    architectures, session = _architectures(), current()
    if model is None and len(architectures) == 1:
        return architectures[0]
    models = [trained.model for trained in session.distribution.trained]
    if model is None:
        fix = "name one: paceline.clip_grad_norm_(1.0, model)."
        raise SpecError("clip_grad_norm_", f"{len(models)} models are distributed.", fix)
    for known, architecture in zip(models, architectures, strict=True):
        if known is model:
            return architecture
    raise SpecError(
        "clip_grad_norm_", "this model was not distributed.", "give it to paceline.distribute."
    )
