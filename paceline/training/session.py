"""One process's part in a job: the public `init`, `distribute`, `shard` and what they share.

A script's loop stays as it was: hooks on the model and the optimizer tell the clock where the time
goes, and scale gradients where workers take uneven parts of a batch. The built-in loop uses the
same calls, so there is one path to measure.
"""

import atexit
import os
import sys
from collections import deque
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.optim import Optimizer

from paceline import architectures, spec
from paceline.architectures.base import Architecture, Context
from paceline.errors import SpecError
from paceline.launch import Identity, identify, meet
from paceline.models.memory import keep_freed_memory, return_freed_memory
from paceline.record import RunFolder, Step
from paceline.telemetry import Recorder, StepClock
from paceline.training import checkup, gathering, stores
from paceline.training.device_clock import DeviceClock

RECENT_STEPS = 20
SETTLED_STEPS = 2
"""After so many, buckets are rebuilt and optimizers have their state: what was freed by then is not
needed again."""


class Session:
    """What a worker knows of its job. Made by `init`, one per process."""

    def __init__(
        self,
        identity: Identity,
        *,
        options: spec.Architecture,
        store: Store | None = None,
        folder: RunFolder | None = None,
        measurement: spec.Measurement,
    ) -> None:
        self.identity, self.options, self.store = identity, options, store
        dilation = _dilation(folder)
        self.clock = StepClock(dilation)
        self.recorder: Recorder | None = None
        self.architecture: Architecture | None = None
        self.step = 0
        self.model: torch.nn.Module | None = None
        self._folder = folder
        self._stack = ExitStack()
        self._samples = 0
        self._loss: Tensor | None = None
        self._open_step: tuple[Step, Tensor | None] | None = None
        self.members = tuple(range(identity.workers))
        """Ranks of the workers that are there; fewer once one is lost and the rest goes on."""
        self.recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        """The last steps of this worker, losses not yet known."""
        self._scale = 1.0
        self._scales_gradients = False
        if folder is not None:
            self.recorder = Recorder(
                folder,
                name=identity.name,
                role=identity.role,
                host=identity.host,
                owns_interfaces=identity.owns_interfaces,
                sample_seconds=measurement.sample_seconds,
                dilation=dilation,
            )
            self._stack.enter_context(self.recorder)

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self.identity.rank

    @property
    def workers(self) -> int:
        return self.identity.workers

    @property
    def speaks_for_all(self) -> bool:
        """One worker does what is done once for all: worker 0 while it is there."""
        return self.identity.role == "worker" and self.rank == self.members[0]

    def note(self, text: str, kind: str = "note") -> None:
        """Put a line into the record, once for all workers unless it is this worker's own."""
        if self.recorder is not None and (self.rank == self.members[0] or kind != "note"):
            self.recorder.note(text, kind, self.step)

    def close(self, failed: BaseException | None = None) -> None:
        """End this process's part; safe to call twice."""
        self._write_open_step()
        if self.architecture is not None:
            if self.recorder is not None:
                self.recorder.member.counters.update(self.architecture.counters())
            self.architecture.close()
            self.architecture = None
        stack, self._stack = self._stack, ExitStack()
        stack.__exit__(type(failed) if failed else None, failed, None)
        store, self.store = self.store, None
        if store is not None and failed is None:
            folder, name = self._folder, self.identity.name
            sent = gathering.pack(folder, name) if folder is not None else ""
            records = stores.leave(store, self.identity, self.members, sent)
            if folder is not None:
                gathering.unpack(folder, records)

    def context(self, device: torch.device) -> Context:
        return Context(
            identity=self.identity,
            store=self.store,
            clock=self.clock,
            device=device,
            note=self.note,
            deadline_seconds=stores.DEADLINE_SECONDS,
            weight=lambda: self._scale,
            members_changed=self._members_changed,
        )

    def distribute(
        self, model: torch.nn.Module, optimizer: Optimizer
    ) -> tuple[torch.nn.Module, Optimizer]:
        if self.architecture is not None:
            fix = "call paceline.distribute once, with the whole model."
            raise SpecError("distribute", "it was called before in this process.", fix)
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            fix = "pass a model with parameters that require gradients."
            raise SpecError("distribute", "the model has nothing to train.", fix)
        device = parameters[0].device
        if device.type == "cuda":
            self.clock = DeviceClock()
        self.architecture = architectures.build(self.options, self.context(device))
        self.model = model
        model, optimizer = self.architecture.distribute(model, optimizer)
        if self.workers > 1:  # alone, nothing is exchanged and nobody waits
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._gradient_ready)
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)
        optimizer.register_step_pre_hook(lambda *_: self.clock.enter("update"))
        optimizer.register_step_post_hook(self._after_step)
        return_freed_memory()
        return model, optimizer

    def scale_gradients(self, scale: float) -> None:
        """This worker's next gradients count `scale` times an equal share."""
        self._scale = scale
        if scale != 1.0 and not self._scales_gradients:
            assert self.model is not None, "distribute comes before uneven batches"
            self._scales_gradients = True
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda g: g if self._scale == 1.0 else g * self._scale)

    def report_loss(self, loss: Tensor | float) -> None:
        """Give the record this worker's loss of the current step: the mean over its samples."""
        loss = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        # From a GPU it travels behind the script's back; by the time the step is over it is here.
        self._loss = loss.to("cpu", non_blocking=True)

    def _members_changed(self, members: tuple[int, ...], lost: tuple[int, ...]) -> None:
        self.members = members
        if self.recorder is not None and self.speaks_for_all:
            for rank in lost:
                self.recorder.lost(f"worker{rank}", self.step, f"the other {len(members)}")

    def _gradient_ready(self, parameter: Tensor) -> None:
        self.clock.ready()

    def _before_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training and torch.is_grad_enabled():
            self.clock.enter("forward")
            first = next((value for value in inputs if isinstance(value, Tensor)), None)
            self._samples += first.shape[0] if first is not None and first.ndim else 0

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.clock.enter("backward")

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        entry = self.clock.end_step(self.step, self._samples)
        entry.learning_rate = float(optimizer.param_groups[0]["lr"])
        self.recent.append(entry)
        self._write_open_step()
        self._open_step, self._loss = (entry, self._loss), None
        self.step, self._samples = self.step + 1, 0
        if len(self.recent) == SETTLED_STEPS:
            return_freed_memory()

    def _write_open_step(self) -> None:
        """A step is written one step late, when reading its loss no longer stalls a GPU."""
        if self._open_step is not None:
            entry, loss = self._open_step
            self.clock.complete(entry)
            entry.loss = None if loss is None else float(loss)
            if self.recorder is not None:
                self.recorder.add_step(entry)
        self._open_step = None


_session: Session | None = None


def init() -> Session:
    """Find out who this process is and join the job; the first call of a script.

    On a server member this does not return: it serves until the workers are done, then exits.
    """
    if _session is not None:
        return _session
    identity = meet(identify(os.environ), os.environ)
    folder, measurement = None, spec.Measurement()
    if identity.run:
        folder = RunFolder(Path(identity.run))
        measurement = folder.experiment().measurement
    asked = architectures.from_environment() or spec.Auto()
    return start(identity, asked, stores.open_store(identity), folder, measurement)


def start(
    identity: Identity,
    asked: spec.Architecture,
    store: Store | None,
    folder: RunFolder | None,
    measurement: spec.Measurement,
) -> Session:
    """Make this process's session; `init` for those who know who they are."""
    global _session
    keep_freed_memory()
    options = _resolve(asked, identity)
    _session = Session(
        identity, options=options, store=store, folder=folder, measurement=measurement
    )
    if store is not None:
        checkup.check(identity, store, options, _session.note)
    if identity.role == "server":
        _serve(_session)
    atexit.register(_close_at_exit)
    return _session


def distribute(model: torch.nn.Module, optimizer: Optimizer) -> tuple[torch.nn.Module, Optimizer]:
    """Return the model and the optimizer to use from here on; all workers start from worker 0's."""
    return current().distribute(model, optimizer)


def no_sync() -> AbstractContextManager[None]:
    """Backward passes inside only accumulate gradients; the first one outside exchanges them."""
    return _architecture().no_sync()


def clip_grad_norm_(max_norm: float) -> None:
    """Bound the norm of the averaged gradient; call it between backward and `optimizer.step()`."""
    _architecture().clip(max_norm)


def report_loss(loss: Tensor | float) -> None:
    """Put this step's loss into the record."""
    current().report_loss(loss)


def current() -> Session:
    """The session of this process; an error that says what to do when there is none."""
    if _session is None:
        raise SpecError("paceline", "init() was not called.", "call paceline.init() first.")
    return _session


def _architecture() -> Architecture:
    architecture = current().architecture
    if architecture is None:
        fix = "call paceline.distribute(model, optimizer) first."
        raise SpecError("paceline", "there is no distributed model yet.", fix)
    return architecture


def _resolve(asked: spec.Architecture, identity: Identity) -> spec.Architecture:
    gpus = torch.cuda.device_count() * (identity.workers // max(identity.local_members, 1) or 1)
    hosts = 1 if identity.local_members >= identity.workers + identity.servers else 2
    resolved, _ = architectures.resolve(asked, workers=identity.workers, hosts=hosts, gpus=gpus)
    return resolved


def _dilation(folder: RunFolder | None) -> float:
    """How many times slower than reported this job runs; only the tunnel slows anything."""
    experiment = folder.experiment() if folder is not None else spec.Experiment()
    return experiment.cluster.dilation if experiment.engine == "tunnel" else 1.0


def _serve(session: Session) -> None:
    counters = architectures.serve(session.options, session.context(torch.device("cpu")))
    if session.recorder is not None:
        session.recorder.member.counters.update(counters)
    session.close()
    sys.exit(0)


def _close_at_exit() -> None:
    """An unhandled exception is in sys.last_value by the time exit handlers run."""
    if _session is not None:
        _session.close(failed=getattr(sys, "last_value", None))
