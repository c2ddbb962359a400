"""A stage as torch's schedules run it: timed, under autocast, between devices."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from paceline import spec
from paceline.architectures.pipeline.measuring import Loss
from paceline.compute.units import WHERE, UnitChain
from paceline.errors import SpecError
from paceline.telemetry import StepClock


class Stage(PipelineStage):
    """Tells the clock when it computes: the rest of a step is waiting, for activations or turns."""

    precision: Callable[[], AbstractContextManager[object]] = nullcontext

    def __init__(self, clock: Callable[[], StepClock], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = clock

    @property
    def clock(self) -> StepClock:
        return self._clock()

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.enter("forward")
        try:
            with self.precision():
                output = super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:  # torch wraps whatever a stage raises
            if isinstance(error.__cause__, SpecError):
                raise error.__cause__ from None
            raise
        self.clock.enter("wait")
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.enter("backward")
        result = super().backward_one_chunk(*args, **kwargs)
        self.clock.ready()
        self.clock.enter("wait")
        return result


class Ends(nn.Module):
    """A stage between its ends: what comes is brought to its device, what goes to where it leaves.

    Activations travel as float32 also under autocast, which rounds them again to what they were.
    """

    def __init__(
        self,
        row: UnitChain,
        device: torch.device,
        leaves_from: torch.device | None,
        layout: torch.memory_format,
        shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.row, self._device, self._leaves_from = row, device, leaves_from
        self._layout, self._shape = layout, shape
        learns = any(parameter.requires_grad for parameter in row.parameters())
        self.anchor = None if learns else nn.Parameter(torch.zeros((), device=device))
        """Takes the gradient where a whole stage is frozen: torch's schedules run it back too."""

    def forward(self, features: Tensor) -> Tensor:
        entered = _Entered.apply(features, self._layout)  # type: ignore[no-untyped-call]
        output: Tensor = self.row(entered.to(self._device))
        if tuple(output.shape) != self._shape:
            problem = f"a stage returns {tuple(output.shape)} for a micro-batch and returned "
            problem += f"{self._shape} when it was measured."
            fix = "use ring: what travels between stages has one shape in every step."
            raise SpecError(WHERE, problem, fix)
        if self.anchor is not None:
            output = output + 0.0 * self.anchor.to(output.dtype)
        if self._leaves_from is None:
            return output
        return output.to(self._leaves_from, torch.float32).contiguous()


class _Entered(torch.autograd.Function):
    """Pictures in the order that computes best; their gradients in the order that travels."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, layout: torch.memory_format) -> Tensor:
        pictures = features.ndim == 4
        return features.contiguous(memory_format=layout) if pictures else features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.contiguous(), None


def schedule(options: spec.Pipeline, stages: list[Stage], loss: Loss) -> Callable[..., Any]:
    """The one place where a schedule is chosen; torch runs it."""
    kinds: dict[str, Any] = {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved": ScheduleInterleaved1F1B,
    }
    given = stages if options.schedule == "interleaved" else stages[0]
    schedule = kinds[options.schedule](given, options.microbatches, loss_fn=loss)
    step: Callable[..., Any] = schedule.step
    if "return_outputs" in inspect.signature(step).parameters:  # not in every torch we run on
        return partial(step, return_outputs=False)
    return step


def under(precision: Callable[[], AbstractContextManager[object]], loss: Loss) -> Loss:
    def computed(output: Tensor, targets: Tensor) -> Tensor:
        with precision():
            return loss(output, targets)

    return computed
