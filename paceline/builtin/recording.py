"""A worker's recorded passes (`compute/graphs.py`), and what replays of them are to architectures.

`single` finds each replay's gradients in the weights. Servers are told beforehand where gradients
will lie, and take them from there as the device makes them; before the next replay the weights must
all be back, because the device cannot stop inside one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from paceline import models, spec
from paceline.architectures.server import streaming_of
from paceline.compute.graphs import RecordedPasses
from paceline.errors import SpecError
from paceline.served.streaming import Replay, Streaming
from paceline.session.session import Session

MARK_BYTES = 2 << 20
"""Bytes of gradients that leave together: a chunk's worth in shared memory."""


class Recording:
    """Made at the first step that it can replay."""

    def __init__(
        self,
        workload: spec.Workload,
        session: Session,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        precision: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._workload, self._session = workload, session
        self._model, self._loss, self._precision = model, loss, precision
        self._passes: RecordedPasses | None = None
        self._streaming: Streaming | None = None
        self._replay: Replay | None = None
        self._looked_at: Tensor | None = None
        """A gradient that is looked at after each replay, which calls no hooks."""
        self._is_over = False

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Both passes of one batch: its loss. None where this one cannot be replayed."""
        if self._is_over or self._session.gradients.scale != 1.0:
            return None
        if not self._is_ready(inputs, targets):
            return None
        assert self._passes is not None
        if not self._passes.fits(inputs):
            return None
        if self._streaming is None:
            loss = self._passes.run(inputs, targets)
        else:
            loss = self._passes.run(
                inputs, targets, before=self._streaming.settle, after=self._tell_servers
            )
        if self._looked_at is not None:
            self._session.steps.observers.nonfinite.look(self._looked_at)
        return loss

    def _is_ready(self, inputs: Tensor, targets: Tensor) -> bool:
        architecture = self._session.architecture
        assert architecture is not None
        streaming = streaming_of(architecture)
        if self._session.options.serves_workers is not None and streaming is None:
            return False  # not yet: servers do not have the weights
        if self._passes is None:
            self._streaming = streaming
            self._record(inputs, targets)
        elif streaming is not self._streaming:  # weights lie elsewhere than the recording reads
            self._is_over = True
        return not self._is_over

    def _record(self, inputs: Tensor, targets: Tensor) -> None:
        if has_hooks(self._model, self._session):  # gradients are scaled, anew in each step
            self._is_over = True
            self._session.note("passes are not recorded: something is done to each gradient.")
            return
        workload, architecture = self._workload, self._session.architecture
        assert architecture is not None
        # Every built-in model begins with a convolution or a matrix product.
        known = models.info(workload.model) is not None and inputs.is_floating_point()
        rounded = torch.bfloat16 if known and workload.precision == "bfloat16" else None
        quiet: AbstractContextManager[None] = nullcontext()
        if self._streaming is not None:
            self._streaming.settle()
            quiet = architecture.no_sync()
        observers = self._session.steps.observers
        with self._session.clock.paused("recording"), quiet, observers.paused():
            self._passes = RecordedPasses(
                self._model,
                self._loss,
                self._precision,
                inputs,
                targets,
                rounded,
                MARK_BYTES if self._streaming is not None else 0,
            )
        if (watched := observers.nonfinite.watched) is not None:
            self._looked_at = self._passes.gradient_of(watched)
        if self._streaming is not None:
            self._replay = self._streaming.record(self._passes.marks)
            self._is_over = self._replay is None

    def _tell_servers(self) -> None:
        assert self._streaming is not None
        assert self._replay is not None
        self._session.clock.ready()
        self._streaming.replay(self._replay)


def has_hooks(model: nn.Module, session: Session) -> bool:
    """Return whether a hook other than our observers' needs each gradient of a step."""
    hooks = [hook for p in model.parameters() for hook in (p._backward_hooks or {}).values()]
    return not all(map(session.steps.observers.is_own, hooks))


def recording_for(
    experiment: spec.Experiment,
    session: Session,
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    precision: Callable[[], AbstractContextManager[object]],
) -> Recording | None:
    """Return the recording of a worker's passes; None on CPUs, and if each gradient is needed as
    it is made."""
    workload, architecture = experiment.workload, experiment.architecture
    on_gpu = next(model.parameters()).device.type == "cuda"
    if not on_gpu or workload.compile or workload.graph == "off":
        return None
    takes = architecture.takes_recorded_passes
    if workload.graph == "on" and not (takes and workload.accumulate == 1):
        name = spec.architecture_name(architecture)
        reason = f"{name} sends gradients while backward makes them"
        reason = "a recorded pass cannot accumulate gradients" if takes else reason
        fix = "leave it out, or use --architecture single or server without --accumulate."
        raise SpecError("--graph", f"graph = on, and {reason}.", fix)
    known = workload.graph == "on" or models.info(workload.model) is not None
    if takes and known and workload.accumulate == 1:
        return Recording(workload, session, model, loss, precision)
    return None
