"""The surroundings of collectives and architectures, seen from one worker.

`Context` holds the facts. What an exchange asks of the training loop around it is
`TrainingContext`; the changes of membership that it reports are `MembershipContext`. The session
implements both; as they stand here they are right for a job whose workers stay the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.collectives.views import Progress, Views
from paceline.errors import PacelineError
from paceline.launch import Identity
from paceline.protocol.views import View
from paceline.spec.workload import GradientUse
from paceline.telemetry import StepClock


class StepAgain(Exception):  # noqa: N818 - a turn of events
    """Raised when a worker failed inside this step before any worker had the sums.

    The gradients of the step are gone, and it is made again from its batch on. It is an error
    neither of the script nor of the job.
    """


AfterBackward = Callable[[Exception | None], None]
"""Called with what a backward pass raised."""


class TrainingContext:
    """The training loop around an exchange, which the exchange asks at any point of a step."""

    repeats_steps = False
    """The loop computes a step again that a failure has interrupted (`StepAgain`), on the whole
    batch. A script cannot: its next step leaves out the failed worker's part of the batch."""

    def weight(self) -> float:
        """Weight of this worker's gradients in the current step; an equal part counts 1."""
        return 1.0

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a small value over the workers; all call it at the same point."""
        return value

    def progress(self) -> Progress:
        """Return where this worker is in its training; asked when workers regroup, and when they
        end."""
        return Progress()

    def settings(self) -> list[float]:
        """The numbers in the optimizers' settings, in an order that is the same on all workers."""
        return []

    def use_settings(self, settings: Sequence[float]) -> None:
        """Called on a worker that joined, before its step: those of an initial worker; zeros if
        none is left."""

    def after_backward(self, do: AfterBackward) -> None:
        """Have `do` called whenever a backward pass of the script has ended."""

    def remember(self, error: PacelineError) -> None:
        """Take note of an error just before it is raised inside a step, where a script may catch
        it."""


class MembershipContext:
    """The session, as it hears of workers and servers that come, end or fail."""

    def ended(self) -> dict[str, int]:
        """Workers that have ended without a failure, and after how many steps; asked when an
        exchange cannot finish."""
        return {}

    def joined_at(self, step: int) -> None:
        """Called once on a worker that joined a running job: the first step it takes part in."""

    def failed_from(self, worker: int, step: int) -> None:
        """Called with a failed worker and the first step that it does not count in, from any
        thread and before the next step begins; -1 where parameters differ in that step."""

    def left_out(self, worker: int, step: int, steps: int) -> None:
        """Called before `members_changed` with a worker that failed or left, the first step that it
        does not count in, and in how many steps from there on batches were still divided with it.
        """

    def members_changed(
        self, members: tuple[int, ...], failed: tuple[int, ...], left: tuple[int, ...] = ()
    ) -> None:
        """Called between two steps on every worker: ranks of those who take the next one, joining
        workers among them, ranks that failed, and ranks that left. From then on the members share
        the whole batch."""

    def server_failed(self, server: str, step: int) -> None:
        """Called between two steps with a server that failed in a step, and without which the
        others continue."""

    def view_changed(self, view: View) -> None:
        """Called by the training thread with the view that follows a failure, before the
        participants continue."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The facts and interfaces that an architecture may use."""

    identity: Identity
    store: Store | None
    """Key-value notes of the members, before they can talk; None when there is one member.

    Each call of `distribute` has a part of its own.
    """

    clock: StepClock
    device: torch.device
    note: Callable[[str], None]
    """Put a line into the record: a fallback taken, something the user may not expect."""

    training: TrainingContext = field(default_factory=TrainingContext)
    membership: MembershipContext = field(default_factory=MembershipContext)

    deadline_seconds: float = 120.0
    """Longest wait for another member."""

    views: Views | None = None
    """Who takes part, if the others continue in place after a failure."""

    gradient_use: GradientUse | None = None
    """What the training loop does with gradients between backward and `optimizer.step()`. None with
    a script, which may do anything, and with an optimizer that cannot run on servers."""
