"""`pipeline`: layers split over workers, micro-batches flow through (model parallelism).

Worker 0 measures every unit of the model, cuts the row into stages of equal time that fit the
memory (`partition`), and tells the others; each worker fills in the weights of its own stages only
(`models.deferred`), so that a model larger than one worker trains. torch.distributed.pipelining
runs the schedule. A step cannot be taken apart into the script's forward and backward, so this is
for the built-in loop; a script of one's own is refused.
"""

import ctypes
import inspect
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.optim import Optimizer

from paceline import spec
from paceline.architectures.base import Context
from paceline.architectures.collective import Flat
from paceline.architectures.group import interface_of
from paceline.architectures.partition import UnitCost, cut, in_flight
from paceline.architectures.trained import Trained
from paceline.data.sampling import part_of
from paceline.errors import DeadlineError, SpecError
from paceline.models.deferred import Deferred, NotRepeatable, build_deferred, build_whole
from paceline.models.units import Row, Unit, units_of
from paceline.protocol.pipeline import Pipe, idle_fraction
from paceline.telemetry import StepClock

WHERE = "architecture pipeline"
PROFILE_REPEATS = 3
FORWARD_FRACTION = 1 / 3
"""Backward computes two products for each one of forward."""

Loss = Callable[[Tensor, Tensor], Tensor]


class Job(NamedTuple):
    """What is trained, as the loop knows it."""

    build: Callable[[], nn.Module]
    sample: Tensor
    """A micro-batch of inputs without memory: shape and type."""

    loss: Loss
    precision: Callable[[], AbstractContextManager[object]]
    channels_last: bool
    weight_factor: float
    """How many times its weights a worker holds: with gradients and the optimizer's state."""


class PipelineModel(nn.Module):
    """One worker's stages, and the schedule that runs them."""

    def __init__(self, options: spec.Pipeline, context: Context, job: Job) -> None:
        super().__init__()
        identity = context.identity
        self._places = _Places(options, identity.workers, identity.rank)
        self._moves = context.device.type == "cuda" and dist.get_backend() == "gloo"
        deferred, units = _shown(job)
        starts, seconds = _agree_on_cuts(options, context, job, deferred, units, self._places)
        rows = [units[a:b] for a, b in zip(starts, [*starts[1:], len(units)], strict=True)]
        self.cuts = [row[0].name for row in rows]
        self.idle_fraction = _idle(options, self._places, seconds)
        shapes = _shapes(rows, job)
        mine = [stage for stage in range(len(rows)) if self._places.owner(stage) == self.place]
        self._is_first, self._is_last = mine[0] == 0, mine[-1] == len(rows) - 1
        own = [Row(rows[stage]) for stage in mine]
        names = _names(rows)
        self._groups = _Groups(self._places, _owners(rows, names, self._places))
        known = [(names[id(p)], row, name) for row in own for name, p in row.named_in_model()]
        deferred.fill([part for row in own for part in row.parts], context.device)
        if job.channels_last:
            for row in own:
                row.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.rows = nn.ModuleList(own)
        self._weights = {key: dict(row.named_in_model())[name] for key, row, name in known}
        """This worker's weights, by their first names in the model."""
        self.clock = context.clock
        self._home = torch.device("cpu") if self._moves else context.device
        """Where activations travel from."""
        stages = [
            _Stage(
                self,
                _Ends(
                    row,
                    context.device,
                    None if stage == len(rows) - 1 else self._home,
                    torch.channels_last if job.channels_last else torch.contiguous_format,
                ),
                stage,
                len(rows),
                self._home,
                input_args=shapes[stage],
                output_args=shapes[stage + 1],
                group=self._groups.pipe,
            )
            for stage, row in zip(mine, own, strict=True)
        ]
        for stage in stages:
            stage.precision = job.precision
        self._run_schedule = _schedule(options, stages, _under(job.precision, job.loss))
        self._averaged: Flat | None = None
        self._telling: Any = None

    @property
    def place(self) -> int:
        """This worker's place in its pipeline."""
        return self._places.place

    @property
    def reads(self) -> bool:
        """Whether this worker needs samples: inputs enter the first stage, targets the last."""
        return self._is_first or self._is_last

    def samples_of(self, count: int) -> slice:
        """The part of a global batch that this worker's pipeline takes."""
        each = count // self._places.replicas
        return slice(self._places.replica * each, (self._places.replica + 1) * each)

    def forward(self, counted: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """A whole step's forward and backward passes; the loss, on every worker by the next step.

        `counted` has as many rows as samples this worker answers for in the record.
        """
        self.settle()
        losses: list[Tensor] = []
        arguments = (inputs.to(self._home).contiguous(),) if self._is_first else ()
        wanted = {"target": targets, "losses": losses} if self._is_last else {}
        self.clock.enter("wait")
        self._run_schedule(*arguments, **wanted)
        self.clock.enter("exchange_exposed")
        self._exchange()
        loss = torch.zeros((), device=self._home)
        if losses:
            loss.copy_(torch.stack(losses).mean())
        last, pipe = self._places.last_rank, self._groups.pipe
        self._telling = dist.broadcast(loss, last, group=pipe, async_op=True)
        if loss.is_cuda:
            self.settle()  # orders the streams; stops nobody
        return loss

    def settle(self) -> None:
        """Wait until the loss of the last step is known here too."""
        if self._telling is not None:
            self._telling.wait()
            self._telling = None

    @property
    def counted_part(self) -> Callable[[int], slice]:
        """Which of its pipeline's samples this worker answers for in the record."""
        return part_of(self.place, [1.0] * self._places.length)

    def clip(self, max_norm: float) -> Tensor:
        """Bound the norm of the whole gradient, of which each worker has a part; returns it."""
        ties = self._groups.ties  # a weight on several stages is counted by the first that has it
        counted = [p for n, p in self._weights.items() if n not in ties or ties[n][1] == self.place]
        norms = [p.grad.norm() for p in counted if p.grad is not None]
        squared = torch.stack(norms).square().sum() if norms else torch.zeros(())
        squared = squared.to(self._home)
        dist.all_reduce(squared, group=self._groups.pipe)
        norm = squared.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.device))
        return norm

    @torch.no_grad()
    def _exchange(self) -> None:
        """Gradients of weights on several stages are added, those of several pipelines averaged."""
        for name, (group, _) in self._groups.ties.items():
            if name in self._weights:
                self._reduce(self._weights[name].grad, group)
        if self._groups.twins is None:
            return
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if self._averaged is None:
            self._averaged = Flat(gradients)
        self._averaged.tensors = gradients
        self._reduce(self._averaged.pack(), self._groups.twins)
        self._averaged.buffer.div_(self._places.replicas)
        self._averaged.unpack()

    def _reduce(self, tensor: Tensor | None, group: Any) -> None:
        assert tensor is not None, "every weight of a stage has a gradient after a step"
        passed = tensor.to(self._home)
        dist.all_reduce(passed, group=group)
        if passed is not tensor:
            tensor.copy_(passed)


class PipelineArchitecture:
    """One worker's side. The model it takes is a `PipelineModel`, which the loop has built."""

    def __init__(self, options: spec.Pipeline, context: Context) -> None:
        self._context = context
        self._model: PipelineModel | None = None

    def distribute(self, trained: Trained) -> None:
        model = trained.model
        if not isinstance(model, PipelineModel):
            problem = "a script that calls its model and backward itself cannot be a pipeline."
            fix = "train it with `paceline train --model module:function`, or choose ring."
            raise SpecError(WHERE, problem, fix)
        self._model, clock = model, self._context.clock
        model.clock = clock
        for optimizer in trained.optimizers:
            optimizer.register_step_pre_hook(lambda *_: clock.ready())
        self._context.note(
            f"stages begin at {', '.join(model.cuts)}; by their measured times the schedule leaves "
            f"workers idle for {model.idle_fraction:.0%} of a step."
        )

    def take(self, optimizer: Optimizer) -> None:
        pass

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # a step is whole: micro-batches accumulate inside it

    def clip(self, max_norm: float) -> Tensor:
        assert self._model is not None
        return self._model.clip(max_norm)

    def settle(self) -> None:
        if self._model is not None:
            self._model.settle()

    def counters(self) -> dict[str, object]:
        if self._model is None:
            return {}
        sizes = [p.numel() * p.element_size() for p in self._model.parameters()]
        return {
            "place": self._model.place,
            "parameter_bytes": sum(sizes),
            "schedule_idle_fraction": self._model.idle_fraction,
        }

    def close(self, *, failed: bool) -> None:
        if dist.is_initialized():
            for one in dist.distributed_c10d._world.pg_map:  # decision 0004
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
            dist.destroy_process_group()


def build(options: spec.Pipeline, context: Context, job: Job) -> PipelineModel:
    """Join the workers' group and make this worker's stages; every worker calls it at once."""
    identity = context.identity
    shared = context.device.type == "cuda" and (
        min(identity.local_members, identity.workers) > torch.cuda.device_count()
    )
    backend = "nccl" if context.device.type == "cuda" and not shared else "gloo"
    if shared:
        context.note("workers share a GPU: activations travel by gloo through main memory.")
    interface = interface_of(identity.address)
    if backend == "gloo" and interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    assert context.store is not None, "a pipeline has several workers"
    dist.init_process_group(
        backend,
        store=PrefixStore("pipeline", context.store),
        rank=identity.rank,
        world_size=identity.workers,
        timeout=timedelta(seconds=context.deadline_seconds),
    )
    return PipelineModel(options, context, job)


class _Places:
    """Who holds which stage of which pipeline: pipelines are runs of consecutive ranks."""

    def __init__(self, options: spec.Pipeline, workers: int, rank: int) -> None:
        self.replicas, self.loops = options.replicas, options.stages_per_worker
        self.length = workers // self.replicas
        self.replica, self.place = divmod(rank, self.length)
        self.last_rank = self.replica * self.length + self.length - 1

    @property
    def num_stages(self) -> int:
        return self.length * self.loops

    def owner(self, stage: int) -> int:
        return stage % self.length

    def pipe(self, replica: int) -> list[int]:
        return list(range(replica * self.length, (replica + 1) * self.length))


class _Groups:
    """Process groups; every worker makes all of them, in one order."""

    def __init__(self, places: _Places, owners: dict[str, list[int]]) -> None:
        pipes = [dist.new_group(places.pipe(r)) for r in range(places.replicas)]
        self.pipe = pipes[places.replica]
        self.twins = None
        if places.replicas > 1:
            columns = [
                dist.new_group([places.pipe(r)[place] for r in range(places.replicas)])
                for place in range(places.length)
            ]
            self.twins = columns[places.place]
        self.ties: dict[str, tuple[Any, int]] = {}
        """Name of a weight that several workers hold -> their group, and the first of them."""
        for name, own in sorted(owners.items()):
            for replica in range(places.replicas):
                group = dist.new_group([places.pipe(replica)[place] for place in own])
                if replica == places.replica:
                    self.ties[name] = (group, own[0])


class _Stage(PipelineStage):
    """Tells the clock when it computes: the rest of a step is waiting, for activations or turns."""

    precision: Callable[[], AbstractContextManager[object]] = nullcontext

    def __init__(self, model: PipelineModel, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._model = model

    @property
    def clock(self) -> StepClock:
        return self._model.clock

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.enter("forward")
        with self.precision():
            output = super().forward_one_chunk(*args, **kwargs)
        self.clock.enter("wait")
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.enter("backward")
        result = super().backward_one_chunk(*args, **kwargs)
        self.clock.ready()
        self.clock.enter("wait")
        return result


class _Ends(nn.Module):
    """A stage between its ends: what comes is brought to its device, what goes to where it leaves.

    Activations travel as float32 also under autocast, which rounds them again to what they were.
    """

    def __init__(
        self,
        row: Row,
        device: torch.device,
        leaves_from: torch.device | None,
        layout: torch.memory_format,
    ) -> None:
        super().__init__()
        self.row, self._device, self._leaves_from = row, device, leaves_from
        self._layout = layout

    def forward(self, features: Tensor) -> Tensor:
        entered = _Entered.apply(features, self._layout)  # type: ignore[no-untyped-call]
        output: Tensor = self.row(entered.to(self._device))
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


def _schedule(options: spec.Pipeline, stages: list[_Stage], loss: Loss) -> Callable[..., Any]:
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


def _idle(options: spec.Pipeline, places: _Places, seconds: Sequence[float]) -> float:
    """What the schedule leaves workers to wait, with stages that take these seconds."""
    pipe = Pipe(
        schedule=options.schedule,
        workers=places.length,
        microbatches=options.microbatches,
        loops=places.loops,
    )
    part = {"forward": FORWARD_FRACTION, "backward": 1 - FORWARD_FRACTION}
    return idle_fraction(pipe, lambda turn: part[turn.kind] * seconds[turn.stage])


def _shown(job: Job) -> tuple[Deferred, list[Unit]]:
    """The model as a row; whole in memory where its weights cannot be made part by part."""
    before = torch.get_rng_state()
    deferred = build_deferred(job.build)
    units = units_of(deferred.model)
    try:
        for unit in units:
            for _, module in unit.modules:
                deferred.check(module)
    except NotRepeatable:
        torch.set_rng_state(before)
        deferred = build_whole(job.build)
        units = units_of(deferred.model)
    return deferred, units


def _agree_on_cuts(
    options: spec.Pipeline,
    context: Context,
    job: Job,
    deferred: Deferred,
    units: Sequence[Unit],
    places: _Places,
) -> tuple[list[int], list[float]]:
    """Worker 0 measures and cuts; all take its cuts. Where stages begin, and how long each takes a
    micro-batch forward and back."""
    store, key = context.store, "pipeline/cuts"
    assert store is not None
    if context.identity.rank == 0:
        costs = _measure(deferred, units, job, context.device)
        starts = cut(
            costs,
            pieces=places.num_stages,
            held=[
                in_flight(
                    options.schedule,
                    stage=places.owner(stage),
                    stages=places.length,
                    microbatches=options.microbatches,
                    loops=places.loops,
                )
                for stage in range(places.num_stages)
            ],
            weight_factor=job.weight_factor,
            memory_bytes=None if options.memory_bytes is None else options.memory_bytes
            // places.loops,
        )  # fmt: skip
        ends = [*starts[1:], len(costs)]
        seconds = [sum(c.seconds for c in costs[a:b]) for a, b in zip(starts, ends, strict=True)]
        store.set(key, msgspec.json.encode((starts, seconds)).decode())
        return starts, seconds
    try:
        return msgspec.json.decode(store.get(key), type=tuple[list[int], list[float]])
    except RuntimeError as error:
        waited = context.deadline_seconds
        raise DeadlineError("learning where stages begin", waited, ["worker0"]) from error


def _measure(
    deferred: Deferred, units: Sequence[Unit], job: Job, device: torch.device
) -> list[UnitCost]:
    """Time each unit by itself, with weights that are there only meanwhile."""
    costs: list[UnitCost] = []
    shape, dtype = job.sample.shape, job.sample.dtype
    for unit in units:
        copied = deferred.copy(Row([unit]), device)
        if dtype.is_floating_point:
            given = torch.randn(shape, dtype=dtype, device=device, requires_grad=bool(costs))
        else:
            given = torch.zeros(shape, dtype=dtype, device=device)
        weights = {p.untyped_storage().data_ptr() for p in copied.parameters()}
        taken, kept = [], 0
        for _ in range(PROFILE_REPEATS):
            sizes: dict[int, int] = {}

            def keep(tensor: Tensor, into: dict[int, int] = sizes) -> Tensor:
                into[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            began = time.perf_counter()
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            with hooks, job.precision():
                output = copied(given)
            output.sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - began)
            kept = sum(size for place, size in sizes.items() if place not in weights)
        shape, dtype = output.shape, output.dtype
        costs.append(
            UnitCost(
                seconds=min(taken), parameter_bytes=unit.parameter_bytes, activation_bytes=kept
            )
        )
    return costs


def _shapes(rows: Sequence[Sequence[Unit]], job: Job) -> list[Tensor]:
    """What enters the first row and leaves each, as tensors without memory."""
    shapes, features = [job.sample], job.sample
    for units in rows:
        row = Row(units)
        meta = _on_meta(row)
        with torch.no_grad():
            features = meta(features)
        shapes.append(features.detach().float().requires_grad_())
    return shapes


def _on_meta(row: Row) -> Callable[[Tensor], Tensor]:
    """Call a row with its weights replaced by ones without memory, wherever they are now."""
    tensors = {**dict(row.named_parameters()), **dict(row.named_buffers())}
    empty = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    return lambda features: torch.func.functional_call(row, empty, (features,))


def _names(rows: Sequence[Sequence[Unit]]) -> dict[int, str]:
    """Identity of each weight -> its first name in the model."""
    names: dict[int, str] = {}
    for units in rows:
        for name, parameter in Row(units).named_in_model():
            names.setdefault(id(parameter), name)
    return names


def _owners(
    rows: Sequence[Sequence[Unit]], names: dict[int, str], places: _Places
) -> dict[str, list[int]]:
    """Weights that lie on several workers -> the places of these."""
    found: dict[str, set[int]] = {}
    for stage, units in enumerate(rows):
        for _, parameter in Row(units).named_in_model():
            found.setdefault(names[id(parameter)], set()).add(places.owner(stage))
    return {name: sorted(own) for name, own in found.items() if len(own) > 1}


def _under(precision: Callable[[], AbstractContextManager[object]], loss: Loss) -> Loss:
    def computed(output: Tensor, targets: Tensor) -> Tensor:
        with precision():
            return loss(output, targets)

    return computed
