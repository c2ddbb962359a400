"""What every architecture promises, seen from one worker.

An architecture averages the workers' gradients (or weights) with equal weight; uneven shares of a
batch are scaled by the session before an architecture sees them.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from paceline.autograd.trained import Trained


class Architecture(Protocol):
    """One worker's side of one call of `distribute`. Made by the table in `architectures`."""

    def distribute(self, trained: Trained) -> None:
        """Called once, before the first step, on every worker.

        After it every worker holds worker 0's numbers. The model and its optimizers stay the
        script's own objects: whatever the script does with them goes on working, or is refused.
        """

    def take(self, optimizer: Optimizer) -> None:
        """The script steps another optimizer on the model; it is one of `trained` from here on.

        Called before that step, on every worker.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate; the first one outside, or else the next
        `optimizer.step()`, exchanges the sum."""

    def clip(self, max_norm: float) -> Tensor:
        """Called between backward and `optimizer.step()`: bound the norm of the whole gradient.

        Returns the norm before. After the step the weights are as if the averaged gradient had
        been clipped.
        """

    def settle(self) -> None:
        """Called before weights are read outside a training forward (evaluation, checkpoint).

        Every worker calls it after the same step, so it may exchange. After it this worker's
        weights are the ones of its last step, complete.
        """

    def counters(self) -> dict[str, object]:
        """What only this architecture can count, for the record."""

    def close(self, *, failed: bool) -> None:
        """Called once at the end, on every worker; after a failure it returns within seconds."""


@runtime_checkable
class Follows(Protocol):
    """An architecture that sees gradients by hooks on the script's tensors."""

    def follow(self) -> None:
        """Called before each backward pass: a tensor may have another inside than before, without
        the hooks."""


@runtime_checkable
class CountsPasses(Protocol):
    """An architecture that does something else in each backward pass, by its number."""

    passes: int
    """Backward passes whose gradients were averaged; a worker that joins takes on the number."""


@runtime_checkable
class KeepsState(Protocol):
    """An architecture that keeps something from step to step which neither model nor optimizer
    holds: gradients left out, an outer optimizer, its place in a round."""

    def state(self) -> dict[str, Any]:
        """Called on every worker after `settle`: tensors, numbers, lists and tables of them; empty,
        on all workers alike, where nothing is kept."""

    def restore(self, state: dict[str, Any], *, own: bool) -> None:
        """Called after `distribute`, before the first step, with what this worker's `state` was;
        training goes on as it would have. Not `own`: it is worker 0's, because there were more or
        fewer workers; what holds for all of them is taken."""
