"""Where a model is cut into stages: worker 0 measures every unit, and all take its cuts."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from paceline import spec
from paceline.architectures.base import Context
from paceline.architectures.partition import UnitCost, cut, in_flight
from paceline.architectures.pipeline.places import Places
from paceline.errors import DeadlineError
from paceline.models.deferred import Deferred, NotRepeatable, build_deferred, build_whole
from paceline.models.units import Row, Unit, units_of
from paceline.protocol.pipeline import Pipe, idle_fraction

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


def as_row(job: Job) -> tuple[Deferred, list[Unit]]:
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


def agree_on_cuts(
    options: spec.Pipeline,
    context: Context,
    job: Job,
    deferred: Deferred,
    units: Sequence[Unit],
    places: Places,
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


def idle(options: spec.Pipeline, places: Places, seconds: Sequence[float]) -> float:
    """What the schedule leaves workers to wait, with stages that take these seconds."""
    pipe = Pipe(
        schedule=options.schedule,
        workers=places.length,
        microbatches=options.microbatches,
        loops=places.loops,
    )
    part = {"forward": FORWARD_FRACTION, "backward": 1 - FORWARD_FRACTION}
    return idle_fraction(pipe, lambda turn: part[turn.kind] * seconds[turn.stage])


def shapes_between(rows: Sequence[Sequence[Unit]], job: Job) -> list[Tensor]:
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
