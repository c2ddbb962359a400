"""The observers of one worker's training, and what the record gets from them.

Each looks at something else of a step: `nonfinite` at one gradient, `reach` at which weights are
trained, `seen_loss` at what `backward()` is called on, `objective` at what that is made of,
`script_profile` at the time of each layer.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.autograd.trained import Trained
from paceline.record import RunFolder
from paceline.session.observers.nonfinite import NonfiniteValues
from paceline.session.observers.objective import Objective
from paceline.session.observers.reach import Reach
from paceline.session.observers.script_profile import ScriptProfile
from paceline.session.observers.seen_loss import SeenLoss, StepLoss

LOADED_STEP = 2
"""In this step a loader's processes are there, and none of the script's own start."""


class Observers:
    """All observers of one worker; most look at the first model that a script distributes."""

    def __init__(self, folder: RunFolder | None) -> None:
        self.nonfinite = NonfiniteValues()
        self.reach = Reach()
        self._seen_loss, self._objective = SeenLoss(), Objective()
        self._loader_processes = 0
        self._profile = ScriptProfile.from_environment()
        self._is_recorded = folder is not None
        self._sees_loss = SeenLoss.is_wanted(folder)

    def watch(
        self, trained: Trained, optimizer: Optimizer, number: int
    ) -> Callable[[Any, Any], None] | None:
        """Look at the `number`th model that is distributed; return what is to be called before
        each backward pass, if anything."""
        if self._profile is not None:
            self._profile.watch(trained.model, optimizer)
        if number > 0 or not self._is_recorded:
            return None
        self.nonfinite.watch(trained.tensors)
        self.reach.watch(trained)
        return self._look if self._sees_loss else None

    def _look(self, roots: Any, gradients: Any) -> None:
        """A backward pass starts from `roots`."""
        self._seen_loss.look(roots, gradients)
        self._objective.look(roots, gradients)

    def forget_step(self) -> None:
        """Forget what was seen of the current step, which is made again."""
        self._seen_loss.forget()

    def end_step(
        self, step: int, reported: Tensor | None, trained: Sequence[Trained]
    ) -> tuple[Tensor | StepLoss | None, Tensor | None]:
        """Return the loss of the step and the sum of the gradients that were looked at."""
        if step == LOADED_STEP and self._sees_loss:
            self._loader_processes = len(multiprocessing.active_children())
        loss = self._seen_loss.unless(reported, trained)
        seen = self.nonfinite.take()
        self.reach.after(step, trained[:1])
        return loss, seen

    def counters(self, script: dict[str, int]) -> dict[str, object]:
        """Return the counters of this worker for the record, with these counts of the `script`."""
        found: dict[str, object] = {"script": {**script, "losses_seen": self._seen_loss.count}}
        if self._loader_processes:
            found["loader"] = {"processes": self._loader_processes}
        seen = {"reach": self.reach.counts, "objective": self._objective.counts()}
        return {**found, **{name: counts for name, counts in seen.items() if counts}}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the gradients made inside: they belong to no step."""
        with self.nonfinite.paused(), self.reach.paused():
            yield

    def is_own(self, hook: object) -> bool:
        """Return whether a hook on a weight belongs to an observer."""
        return hook in (self.nonfinite.look, self.reach.look_before)
