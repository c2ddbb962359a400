"""What collectives and architectures are given: their surroundings, seen from one worker."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.collectives.crew import Crew, Progress
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
