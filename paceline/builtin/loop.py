"""The loop of one worker on a built-in workload. It uses `distribute` as any script would."""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from paceline import data, models, spec
from paceline.architectures import pipeline
from paceline.architectures.base import Architecture
from paceline.architectures.pipeline import PipelineJob, PipelineModel
from paceline.builtin import batches, checkpoint, optimizers
from paceline.builtin.balance import balance
from paceline.builtin.evaluation import accuracy
from paceline.builtin.recording import recording_for
from paceline.builtin.schedule import learning_rate
from paceline.collectives.context import StepAgain
from paceline.compute.emulated import EmulatedModel, model_for, skip_updates
from paceline.errors import RecordError, SpecError
from paceline.record import RunFolder, checkpoints
from paceline.record.checkpoints import Found
from paceline.session.session import Session

STAGES = -3
"""The part for cutting a model into stages, which comes before `distribute`."""


def train(experiment: spec.Experiment, session: Session, folder: RunFolder) -> None:
    """Train as `experiment` says, from the first step or from a checkpoint, to the last."""
    workload, cluster = experiment.workload, experiment.cluster
    prepare_compute(workload, cluster, session)
    torch.manual_seed(workload.seed)
    dataset, model = _open(experiment, session)
    optimizer = optimizers.build(workload.optimizer, model.parameters())
    start = _begin(experiment, session, folder.path, model, optimizer)

    shares = list(cluster.shares) or [1.0] * cluster.workers
    total = workload.global_batch_for(cluster.workers)
    num_steps = workload.num_steps(cluster.workers, len(dataset))
    if start >= num_steps and not (
        session.participants.has_joined or checkpoints.exist(folder.path)
    ):
        problem = f"{workload.resume} has {start} steps behind it, and {num_steps} were asked for."
        raise SpecError("resume", problem, "ask for more steps or epochs.")
    if workload.epochs and (rest := len(dataset) % total):
        left = f"{rest} of {len(dataset)} samples fill no batch of {total}"
        session.note(f"{left} and are left out of each epoch, others in each.")
    worker = _Worker(experiment, session, model, optimizer, num_steps)
    if isinstance(model, PipelineModel):
        source = batches.source_of_stages(workload, dataset, session, model, worker.device)
    else:
        source = batches.source(workload, dataset, shares, session, worker.device)
    steps = source.steps(start, num_steps)
    for step, batch in enumerate(batches.timed(steps, session, worker.device), start):
        while not worker.took(step, batch, total):
            session.steps.begin_again()
            batch = next(batches.timed(source.steps(step, step + 1), session, worker.device))
        if cluster.balance and step - start + 1 == max(3, experiment.measurement.warmup_steps):
            with session.clock.paused("balancing"):
                balance(session, shares)
        every = workload.checkpoint_every
        if every and ((step + 1) % every == 0 or step + 1 == num_steps):
            with session.clock.paused("checkpoint"):
                worker.save(folder.path, step + 1)
    worker.finish(dataset)
    has_spoken = session.participants.is_speaker
    session.end_together()
    if session.participants.is_speaker and not has_spoken:  # who did was lost at the last moment
        if workload.checkpoint_every:
            worker.write(folder.path, num_steps, (session.rank,))
        worker.conclude(dataset)
    dataset.close()


def _open(experiment: spec.Experiment, session: Session) -> tuple[data.Dataset, nn.Module]:
    """The samples, and what is trained on them."""
    emulated = model_for(experiment, session.identity.name)
    if emulated is not None:
        session.note("emulated device: no data, gradients or updates are computed, loss unknown")
        return data.open("synthetic", input_shape=(1,)), emulated
    dataset = batches.open_data(experiment.workload)
    staging = experiment.architecture.staging
    if staging is not None:
        return dataset, build_stages(experiment, staging, session, dataset)
    return dataset, build_model(experiment.workload, dataset)


def _begin(
    experiment: spec.Experiment, session: Session, run: Path, model: nn.Module, optimizer: Optimizer
) -> int:
    """Distribute the model, as a checkpoint has it if there is one; the first step to be taken."""
    workload, start = experiment.workload, 0
    resumed: Found | None = None
    if not (isinstance(model, PipelineModel) or session.participants.has_joined):
        resumed = _found(workload, run)
    if resumed is not None:
        start = checkpoint.load(resumed, model=model, optimizer=optimizer)
    session.distribution.repeats_steps = session.options.exclusive
    session.join_obstacle.batches_are_divided = True
    session.distribute(model, optimizer, gradient_use=workload.gradient_use)
    if session.participants.has_joined:
        start = session.participants.first_step
    session.participants.begin_at(start)
    if isinstance(model, EmulatedModel):
        skip_updates(optimizer)
        model.pace.passes = start * workload.accumulate
    if resumed is not None:
        _go_on(resumed, experiment, session, run)
    return start


def prepare_compute(workload: spec.Workload, cluster: spec.Cluster, session: Session) -> None:
    """Use one thread per core of this worker's share and one GPU; slow denormals count as zero.

    On a GPU `float32` means float32: torch's own default rounds convolutions as `tf32` does.
    """
    if session.identity.launcher != "paceline":  # ours has said it; others guess, or say 1
        local_workers = max(1, min(session.identity.local_members, cluster.workers))
        cores = len(os.sched_getaffinity(0))
        share = cores if cores < (os.cpu_count() or 1) else max(1, cores // local_workers)
        torch.set_num_threads(cluster.threads or share)
    torch.set_flush_denormal(True)
    if torch.cuda.is_available():
        torch.cuda.set_device(session.identity.local_index % torch.cuda.device_count())
        rounds = workload.precision != "float32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = rounds
        torch.backends.cudnn.benchmark = True  # every step has the same shapes


def build_model(workload: spec.Workload, dataset: data.Dataset) -> nn.Module:
    """The model in the layout that is fastest for it, unless the user chose one."""
    model = models.build(
        workload.model, input_shape=dataset.input_shape, num_classes=dataset.num_classes
    )
    if _is_channels_last(workload):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = model.to(_own_device())
    if workload.compile:
        # The forward pass alone: hooks on the model, such as the clock's, stay outside.
        mode = "reduce-overhead" if workload.graph == "on" else None
        compiled: Any = torch.compile(model.forward, mode=mode)
        model.forward = compiled
    return model


def _is_channels_last(workload: spec.Workload) -> bool:
    described = models.info(workload.model)
    recommended = described is not None and described.channels_last
    return workload.layout == "channels-last" or (workload.layout == "auto" and recommended)


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class _Worker:
    """Takes the steps of one worker, and writes its checkpoints."""

    def __init__(
        self,
        experiment: spec.Experiment,
        session: Session,
        model: nn.Module,
        optimizer: Optimizer,
        num_steps: int,
    ) -> None:
        self._experiment, self._workload, self._session = experiment, experiment.workload, session
        self._model, self._optimizer, self._num_steps = model, optimizer, num_steps
        self.device = next(model.parameters()).device
        self._random = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
        self._knows_loss = not isinstance(model, EmulatedModel)
        self._recording = recording_for(experiment, session, model, self._loss, self._precision)
        model.train()

    def took(self, step: int, batch: data.Batch, total: int) -> bool:
        """Take a step; False where a worker was lost in it, and all make it again."""
        session, model = self._session, self._model
        if not isinstance(model, PipelineModel):
            session.gradients.scale_by(len(batch[0]) * len(session.participants.sharing) / total)
        again = session.view_changes.go_on and session.distribution.repeats_steps
        before = [one.clone() for one in model.buffers()] if again else []
        try:
            self.step(step, *batch)
        except StepAgain:
            for buffer, was in zip(model.buffers(), before, strict=True):
                buffer.copy_(was)  # statistics of batches, which see each batch once
            return False
        return True

    def step(self, step: int, inputs: Tensor, targets: Tensor) -> None:
        """Take one optimizer step on this worker's part of the global batch."""
        workload, session = self._workload, self._session
        if self._random:  # a function of the step and the worker, so that resuming is exact
            torch.manual_seed(hash((workload.seed, step, session.rank)) & 0x7FFF_FFFF_FFFF)
        staging = self._experiment.architecture.staging
        rate = learning_rate(
            workload,
            step=step,
            num_steps=self._num_steps,
            workers=session.workers,
            replicas=staging.replicas if staging is not None else None,
        )
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = rate
        recording = self._recording
        total = recording.run(inputs, targets) if recording is not None else None
        if total is None:
            self._optimizer.zero_grad(set_to_none=True)
            total = self._pass(inputs, targets)
        if workload.clip_norm:
            self._architecture.clip(workload.clip_norm)
        if self._knows_loss:
            session.report_loss(total)
        self._optimizer.step()

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward, in pieces where gradients are accumulated; returns the loss."""
        pieces = self._workload.accumulate
        if isinstance(self._model, PipelineModel):
            counted = inputs[self._model.counted_part(len(inputs))]
            whole: Tensor = self._model(counted, inputs, targets)
            return whole
        if pieces == 1:
            with self._precision():
                loss = self._loss(self._model(inputs), targets)
            loss.backward()
            return loss.detach()
        total = torch.zeros((), device=self.device)
        parts = list(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True))
        for number, (part, labels) in enumerate(parts, 1):
            with self._architecture.no_sync() if number < len(parts) else nullcontext():
                with self._precision():
                    loss = self._loss(self._model(part), labels) * (len(part) / len(inputs))
                loss.backward()
            total += loss.detach()
        return total

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        smoothing = self._workload.label_smoothing
        return functional.cross_entropy(logits, targets, label_smoothing=smoothing)

    def save(self, run: Path, next_step: int) -> None:
        """A checkpoint by all workers."""
        self._architecture.settle()
        self.write(run, next_step, self._session.participants.present)

    def write(self, run: Path, next_step: int, members: Sequence[int]) -> None:
        """Write a checkpoint. A failure ends the training only if it is the last checkpoint."""
        session = self._session
        try:
            checkpoint.save(
                run,
                step=next_step,
                model=self._model,
                optimizer=self._optimizer,
                architecture=self._architecture,
                experiment=self._experiment,
                store=session.store,
                rank=session.rank,
                members=members,
                must_stop=lambda: session.view_changes.must_stop,
            )
        except RecordError as error:
            if next_step >= self._num_steps:
                raise
            text = f"{error} The one before is kept, and training goes on."
            print(f"warning: {text}", file=sys.stderr, flush=True)
            session.note(text, "warning")

    def finish(self, dataset: data.Dataset) -> None:
        """Bring the weights to rest, and measure them where asked."""
        self._architecture.settle()
        self.conclude(dataset)

    def conclude(self, dataset: data.Dataset) -> None:
        """Record the results that one worker finds out for all."""
        session, workload = self._session, self._workload
        if session.recorder is None or not session.participants.is_speaker:
            return
        results = session.recorder.member.results
        results["num_samples"] = float(len(dataset))
        if self._knows_loss and workload.data != "synthetic":
            results["num_classes"] = float(dataset.num_classes)
        if workload.evaluate:
            with session.clock.paused("evaluation"):
                test = batches.open_data(workload, train=False)
                results.update(accuracy(self._model, test, self.device))
                test.close()

    @property
    def _architecture(self) -> Architecture:
        assert self._session.architecture is not None
        return self._session.architecture

    def _precision(self) -> AbstractContextManager[object]:
        return precision_of(self._workload, self.device)


def precision_of(workload: spec.Workload, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which forward passes and the loss are computed."""
    if workload.precision != "bfloat16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def build_stages(
    experiment: spec.Experiment,
    options: spec.Pipeline,
    session: Session,
    dataset: data.Dataset,
) -> PipelineModel:
    """This worker's stages of the model."""
    workload, workers = experiment.workload, experiment.cluster.workers
    total = workload.global_batch_for(workers)
    samples, _ = dataset[0]
    microbatch = total // (options.replicas * options.microbatches)
    device = _own_device()
    job = PipelineJob(
        build=lambda: models.build(
            workload.model, input_shape=dataset.input_shape, num_classes=dataset.num_classes
        ),
        sample=torch.empty((microbatch, *samples.shape), dtype=samples.dtype, device="meta"),
        loss=partial(functional.cross_entropy, label_smoothing=workload.label_smoothing),
        precision=lambda: precision_of(workload, device),
        channels_last=_is_channels_last(workload),
        weight_factor=2 + workload.optimizer.state_numbers,
    )
    return pipeline.build(options, session.context(device, STAGES), job)


def _found(workload: spec.Workload, own: Path) -> Found | None:
    """Return the checkpoint to resume from: a restarted run has its own, which come first."""
    if checkpoints.exist(own):
        return checkpoints.choose(own)
    return checkpoints.choose(Path(workload.resume)) if workload.resume else None


def _go_on(found: Found, experiment: spec.Experiment, session: Session, own: Path) -> None:
    """Give the architecture what it kept, and say where this run is not the one that stopped."""
    assert session.architecture is not None
    told = list(found.passed_over)
    if found.path.parent.parent != own:  # its own last steps, which may have been all
        told += checkpoints.differences(found, experiment)
    was, now = found.manifest.facts, checkpoints.facts_of(experiment)
    if was.architecture == now.architecture:
        same = was.workers == now.workers
        checkpoint.load_own(found, session.architecture, session.identity.name, own=same)
    for text in told:
        session.note(text)
