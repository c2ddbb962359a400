"""The steps of one worker: timed, counted, and written into the record of the run.

A step is written one step late, when reading its loss no longer stalls a GPU.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import spec
from paceline.autograd.trained import Trained
from paceline.launch import Identity
from paceline.record import RunFolder, Step
from paceline.record.entries import IN_EVALUATION, NOT_FINITE
from paceline.record.lives import RECOVERY
from paceline.session.observers.device_clock import DeviceClock
from paceline.session.observers.observers import Observers
from paceline.session.observers.passes import SampleCount
from paceline.session.observers.seen_loss import StepLoss
from paceline.session.participants import Participants
from paceline.telemetry import Recorder, StepClock

EVALUATING = "dropout is off, batch norm keeps its statistics; model.train() ends that"
RECENT_STEPS = 20


class StepRecord:
    """Measures the steps of this worker, and has the recorder that writes them."""

    def __init__(
        self,
        participants: Participants,
        folder: RunFolder | None,
        measurement: spec.Measurement,
    ) -> None:
        dilation = _dilation(folder)
        self.clock = StepClock(dilation)
        self.samples = SampleCount()
        self.observers = Observers(folder)
        self.recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        """The last steps of this worker; their losses are not known yet."""

        self.recorder: Recorder | None = None
        self._participants = participants
        self._loss: Tensor | None = None
        self._open: tuple[Step, Tensor | StepLoss | None, Tensor | None] | None = None
        self._stack = ExitStack()
        if folder is not None:
            identity = participants.identity
            self.recorder = _recorder(identity, folder, measurement, dilation)
            self._stack.enter_context(self.recorder)

    def note(self, text: str, kind: str = "note") -> None:
        """Put a line into the record, once for all workers unless it is this worker's own."""
        who = self._participants
        if self.recorder is not None and (kind != "note" or who.rank == who.speaker):
            self.recorder.note(text, kind, who.step)

    def time_device(self) -> None:
        """Time the steps by events on the GPU from now on."""
        self.clock = DeviceClock()

    def report_loss(self, loss: Tensor | float) -> None:
        """Record this worker's loss of the current step: the mean over its samples."""
        loss = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        # It is copied from a GPU without waiting; when the step is written it has arrived.
        self._loss = loss.to("cpu", non_blocking=True)

    def begin_again(self) -> None:
        """Make the step again from its batch on; the time spent on it so far is recovery."""
        self.clock.begin_again(RECOVERY)
        self.samples.forget_step()
        self.observers.forget_step()

    def end_step(self, optimizer: Optimizer, trained: Sequence[Trained]) -> None:
        """Close the current step, which `optimizer` ended; it is written when the next one ends."""
        passes, step = self.samples.last, self._participants.step
        in_evaluation = passes.trains_in_evaluation
        count = self.samples.end_step(is_training=trained[-1].model.training)
        entry = self.clock.end_step(step, count)
        if passes.trains_in_evaluation and not in_evaluation:
            text = f"from step {step} on it trains in evaluation mode: {EVALUATING}"
            self.note(text, IN_EVALUATION)
        rate = optimizer.param_groups[0].get("lr")
        entry.learning_rate = None if rate is None else float(rate)
        self.recent.append(entry)
        self._write_open_step()
        self._open = (entry, *self.observers.end_step(step, self._loss, trained))
        self._loss = None
        self._participants.step += 1

    def end_training(self) -> None:
        """Write the last step, and note the pauses after it."""
        self._write_open_step()
        if self.recorder is not None and self.samples.passes:
            self.recorder.member.paused_seconds = self.clock.end_training()

    def close(self, failed: BaseException | None, num_sharded: int) -> None:
        """End the record; safe to call twice."""
        stack, self._stack = self._stack, ExitStack()
        if self.recorder is not None and self._participants.identity.role == "worker":
            script = {"distributed": len(self.samples.passes), "sharded": num_sharded}
            counters = self.observers.counters(script)
            self.recorder.member.counters.update(counters)
        stack.__exit__(type(failed) if failed else None, failed, None)

    def _write_open_step(self) -> None:
        if self._open is None:
            return
        entry, loss, seen = self._open
        self._open = None
        self.clock.complete(entry)
        entry.loss = None if loss is None else float(loss)
        name = self._participants.identity.name
        complaint = self.observers.nonfinite.complaint(name, entry.step, entry.loss, seen)
        if self.recorder is not None:
            if complaint:
                self.recorder.note(complaint, NOT_FINITE, entry.step)
            self.recorder.add_step(entry)


def _recorder(
    identity: Identity, folder: RunFolder, measurement: spec.Measurement, dilation: float
) -> Recorder:
    return Recorder(
        folder,
        name=identity.name,
        role=identity.role,
        host=identity.host,
        owns_interfaces=identity.owns_interfaces,
        sample_seconds=measurement.sample_seconds,
        warmup_steps=measurement.warmup_steps,
        dilation=dilation,
    )


def _dilation(folder: RunFolder | None) -> float:
    """Factor by which this job runs slower than reported; only the tunnel slows anything."""
    experiment = folder.experiment() if folder is not None else spec.Experiment()
    return experiment.cluster.dilation if experiment.engine == "tunnel" else 1.0
