"""The models of a script that were distributed: their optimizers, architectures and gradients.

A script's loop stays as it was: hooks on the model and the optimizer tell the clock where the time
goes, and scale gradients where workers take uneven parts of a batch. The built-in loop uses the
same calls, so there is one path to measure.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.architectures.base import Architecture, Follows
from paceline.autograd.backward import AroundBackward
from paceline.autograd.gradients import uncompiled
from paceline.autograd.mixing import mix_in
from paceline.autograd.scaling import ScaledGradients
from paceline.autograd.trained import Trained
from paceline.collectives.context import AfterBackward, TrainingContext
from paceline.collectives.views import Progress
from paceline.compute.freed_memory import return_freed_memory
from paceline.errors import PacelineError, SpecError
from paceline.session.observers.passes import Passes, Timed
from paceline.session.participants import Participants
from paceline.session.step_record import StepRecord

SETTLED_STEPS = 2
"""After this many steps, buckets are rebuilt and optimizers have their state: memory that was freed
by then is not needed again."""


class Distribution(TrainingContext):
    """The models that one worker trains, and the architecture of each call of `distribute`."""

    def __init__(
        self,
        steps: StepRecord,
        participants: Participants,
        mean: Callable[[Tensor], Tensor],
        after_step: Callable[[], None],
    ) -> None:
        """`mean` averages a value over the workers; `after_step` is called between two steps."""
        self.trained: list[Trained] = []
        self.architectures: list[Architecture] = []
        self.gradients = ScaledGradients(self.trained, self.remember)
        self.error: PacelineError | None = None
        """The first error of ours that was raised inside a step."""

        self._steps, self._participants = steps, participants
        self._mean, self._call_after_step = mean, after_step
        self._given_settings: Sequence[float] = ()
        self._backward = AroundBackward()
        self._stack = ExitStack()

    @property
    def architecture(self) -> Architecture | None:
        """The architecture of the last call of `distribute`; None before the first."""
        return self.architectures[-1] if self.architectures else None

    @property
    def is_training(self) -> bool | None:
        """Return whether a distributed model is in training mode; None before there is one."""
        models = [trained.model for trained in self.trained]
        return any(model.training for model in models) if models else None

    def check(self, model: torch.nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        """Raise SpecError where these cannot be distributed."""
        if not optimizers:
            fix = "call paceline.distribute(model, optimizer), with every optimizer of the model."
            raise SpecError("distribute", "it was given a model without an optimizer.", fix)
        for before in self.trained:
            if model is before.model or any(o in before.optimizers for o in optimizers):
                problem = "this model or optimizer was distributed before."
                fix = "call it once for each model; an optimizer made later joins when it steps."
                raise SpecError("distribute", problem, fix)
        for optimizer in optimizers:
            if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                name = type(optimizer).__name__
                problem = f"{name} has not called the __init__ of torch's Optimizer."
                fix = "call super().__init__(params, defaults) in it, or give the one inside it."
                raise SpecError("distribute", problem, fix)

    def add(self, trained: Trained, architecture: Architecture) -> None:
        """Train this model by this architecture from now on."""
        number = len(self.trained)
        self.trained.append(trained)
        self.architectures.append(architecture)
        architecture.distribute(trained)
        passes = Passes(self._steps.clock, lambda: self.gradients.scale != 0.0)
        self._steps.samples.passes.append(passes)
        mix_in(trained.model, Timed, _paceline_passes=passes)
        for optimizer in trained.optimizers:
            self._follow(optimizer)
        look = self._steps.observers.watch(trained, trained.optimizers[-1], number)
        if look is not None:
            self._backward.before.append(look)
        self.gradients.watch_more()
        if number == 0:
            self._watch_passes(architecture)
        return_freed_memory()

    def _watch_passes(self, architecture: Architecture) -> None:
        several = self._participants.workers > 1
        if several or isinstance(architecture, Follows):
            self._backward.before.append(self._before_backward)
        self._stack.callback(self._backward.watch())
        if several:
            handle = register_optimizer_step_pre_hook(uncompiled(self._adopt))
            self._stack.callback(handle.remove)

    def close(self, counters: dict[str, object], *, failed: bool) -> None:
        """End all architectures; their counters for the record are added to `counters`."""
        while self.architectures:
            architecture = self.architectures.pop()
            counters.update(architecture.counters())
            architecture.close(failed=failed)

    def release(self) -> None:
        """Take back what was replaced in torch; safe to call twice."""
        self._stack.close()

    def weight(self) -> float:
        """See `TrainingContext`."""
        return self.gradients.scale

    def mean(self, value: Tensor) -> Tensor:
        """See `TrainingContext`."""
        return self._mean(value)

    def progress(self) -> Progress:
        """See `TrainingContext`."""
        step, samples = self._participants.step, self._steps.samples
        return Progress(
            step=step,
            next_step=step + (samples.in_step > 0),
            samples=samples.total,
            weight=self.gradients.scale,
        )

    def settings(self) -> list[float]:
        """See `TrainingContext`."""
        return [float(group[name]) for group, name in self._settings()]

    def use_settings(self, settings: Sequence[float]) -> None:
        """See `TrainingContext`."""
        if any(settings):
            self._given_settings = settings

    def _take_settings(self) -> None:
        """On a worker that joined: its own schedule began when it came."""
        if self._given_settings:
            for (group, name), value in zip(self._settings(), self._given_settings, strict=True):
                group[name] = type(group[name])(value)

    def _settings(self) -> Iterator[tuple[dict[str, Any], str]]:
        for trained in self.trained:
            for optimizer in trained.optimizers:
                for group in optimizer.param_groups:
                    numbers = (n for n, v in sorted(group.items()) if type(v) in (int, float))
                    yield from ((group, name) for name in numbers if not name.startswith("initial"))

    def after_backward(self, do: AfterBackward) -> None:
        """See `TrainingContext`."""
        self._backward.after.append(do)

    def remember(self, error: PacelineError) -> None:
        """Keep an error that a script may catch inside a step: it has trained wrongly then, and
        must not end as if it had not."""
        self.error = self.error or error

    def _before_backward(self, *_: Any) -> None:
        try:
            for architecture in self.architectures:
                if isinstance(architecture, Follows):
                    architecture.follow()
        except PacelineError as error:
            self.remember(error)
            raise
        self.gradients.watch_more()

    def _follow(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(uncompiled(self._before_step))
        optimizer.register_step_post_hook(uncompiled(self._after_step))
        self._last_optimizer = optimizer

    def _before_step(self, *_: Any) -> None:
        self._take_settings()
        self._steps.clock.enter("update")

    def _adopt(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer steps: one that `distribute` was not given joins those of its model."""
        if any(known is optimizer for trained in self.trained for known in trained.optimizers):
            return
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        ours = {id(tensor) for tensor in tensors}
        for trained, architecture in zip(self.trained, self.architectures, strict=False):
            if any(id(tensor) in ours for tensor in trained.everything()):
                architecture.take(optimizer)
                trained.optimizers.append(optimizer)
                self._follow(optimizer)
                return
        if any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors):
            problem = (
                "an optimizer that it was not given updates parameters of no distributed model."
            )
            fix = "give it: paceline.distribute(model, optimizer, another)."
            raise SpecError("distribute", problem, fix)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """End the step; with several optimizers the one that was distributed last ends it."""
        self._steps.clock.enter("other")
        if optimizer is not self._last_optimizer:
            return
        self.gradients.watch_more()
        self._steps.end_step(optimizer, self.trained)
        self._call_after_step()
        if len(self._steps.recent) == SETTLED_STEPS:
            return_freed_memory()
