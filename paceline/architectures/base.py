"""What every architecture promises, seen from one worker, and what it is given.

An architecture averages the workers' gradients (or weights) with equal weight; uneven shares of a
batch are scaled by the session before an architecture sees them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.optim import Optimizer

from paceline.architectures.crew import Crew, Progress
from paceline.architectures.trained import Trained
from paceline.errors import PacelineError
from paceline.launch import Identity
from paceline.protocol.regrouping import Regroup
from paceline.telemetry import StepClock


class StepAgain(Exception):  # noqa: N818 - a turn of events
    """A worker was lost inside this step, before anybody had the sums: its gradients are gone, and
    the step is to be made again from the batch on. No error of the script's, and not of the job's.
    """


GradientUse = Literal["nothing", "clip"]

AfterBackward = Callable[[Exception | None], None]
"""Called with what a backward pass raised."""


class MembersChanged(Protocol):
    """See `Context`."""

    def __call__(
        self, members: tuple[int, ...], lost: tuple[int, ...], left: tuple[int, ...] = ()
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an architecture may use of its surroundings."""

    identity: Identity
    store: Store | None
    """Where members leave each other notes before they can talk; None when there is one member.

    Each call of `distribute` has a part of its own.
    """

    clock: StepClock
    device: torch.device
    note: Callable[[str], None]
    """Put a line into the record: a fallback taken, something the user may not expect."""

    deadline_seconds: float = 120.0
    """How long any wait for another member may take."""

    weight: Callable[[], float] = lambda: 1.0
    """What this worker's gradients of the current step count, an equal part being 1."""

    mean: Callable[[Tensor], Tensor] = lambda value: value
    """The mean of a small value over the workers; all of them call it at the same point."""

    ended: Callable[[], dict[str, int]] = dict
    """Workers that have ended well, and after how many steps."""

    members_changed: MembersChanged = lambda members, lost, left=(): None
    """Called between two steps on every worker: ranks of those who take the next one, newcomers
    among them, ranks lost, and of those who have left. From then on they share the whole batch.
    """

    left_out: Callable[[int, int, int], None] = lambda worker, step, steps: None
    """Called before `members_changed` with such a worker, the first step that it does not count in,
    and in how many steps from that one on samples were divided with it all the same."""

    lost_from: Callable[[int, int], None] = lambda worker, step: None
    """Called with a lost worker and the first step that it does not count in, from any thread and
    before the next step begins; -1 where that is not the same for all parameters."""

    server_lost: Callable[[str, int], None] = lambda server, step: None
    """Called between two steps with a server that was lost in a step, and without which the others
    go on."""

    starts_at: Callable[[int], None] = lambda step: None
    """Called where this worker has joined a job that ran: the first step it takes part in."""

    broke: Callable[[PacelineError], None] = lambda error: None
    """Called with an error that is about to be raised inside a script's step, where the script may
    catch it."""

    after_backward: Callable[[AfterBackward], None] = lambda do: None
    """Have a function called whenever a backward pass of the script has ended."""

    crew: Crew | None = None
    """The workers, where they go on in place without one that is lost."""

    progress: Callable[[], Progress] = Progress
    """Where this worker is in its training."""

    makes_again: Callable[[], bool] = lambda: False
    """Whether the loop computes a step again that was interrupted by a loss (`StepAgain`), on the
    whole batch. A script cannot: there the lost part of the batch is left out."""

    gradient_use: GradientUse | None = None
    """What is done with gradients between backward and `optimizer.step()`: nothing, or `clip`. None
    where only a step will show it: with a script."""

    regrouped: Callable[[Regroup], None] = lambda regroup: None
    """Called when workers were lost and the others have agreed, before they go on."""


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
