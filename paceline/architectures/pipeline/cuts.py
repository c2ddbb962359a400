"""Where a model is cut into stages: worker 0 measures every unit, and all take its cuts."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import psutil
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from paceline import spec
from paceline.architectures.pipeline.measuring import MeasuredUnits, PipelineJob, measure
from paceline.architectures.pipeline.places import Places
from paceline.autograd.trained import require_trainable
from paceline.collectives.context import Context
from paceline.compute.deferred import Deferred, NotRepeatable, build_deferred, build_whole
from paceline.compute.units import Unit, units_of
from paceline.errors import DeadlineError, ExchangeError, SpecError
from paceline.protocol.partition import cut, in_flight, too_few
from paceline.protocol.pipeline import Pipe, idle_fraction

FORWARD_FRACTION = 1 / 3
"""Backward computes two products for each one of forward."""

SMALL_BYTES = 256 * 2**20
"""Weights of a model that every worker builds whole and takes its part of: whatever a constructor
does is then done as for `single`. Training it takes several times that anyway."""

KEY = "pipeline/cuts"


class Built(NamedTuple):
    """The model as a row, whole in memory or not."""

    deferred: Deferred
    units: list[Unit]
    before: Tensor
    """The random generator's state before the model was built."""

    @property
    def weight_bytes(self) -> int:
        model = self.deferred.model
        return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


class Cuts(msgspec.Struct, frozen=True, kw_only=True):
    """What worker 0 tells the others."""

    starts: list[int] = []
    """The first unit of each stage."""

    seconds: list[float] = []
    """How long each stage takes a micro-batch forward and back."""

    shapes: list[tuple[int, ...]] = []
    """What each stage returns for a micro-batch."""

    sees_batch: list[str] = []
    """Units in which a sample's output depends on more than the sample."""

    is_whole: bool = False
    """Everyone is to build the model whole."""

    is_compared: bool = True
    """Whether the units were seen to compute what the model does."""

    refused: tuple[str, str, str] | None = None
    """Where, problem and fix: the model cannot be cut."""

    failed: str = ""


def as_row(options: spec.Pipeline, job: PipelineJob) -> Built:
    """The model as a row; whole in memory where it is small, or cannot be made part by part."""
    before = torch.get_rng_state()
    try:
        deferred = build_deferred(job.build)
        built = Built(deferred, units_of(deferred.model), before)
        for unit in built.units:
            for _, module in unit.modules:
                deferred.check(module)
    except NotRepeatable:
        return _whole(job, before)
    require_trainable(built.deferred.model.named_parameters())
    limit = options.memory_bytes
    if built.weight_bytes <= (SMALL_BYTES if limit is None else min(SMALL_BYTES, limit // 2)):
        return _whole(job, before)
    return built


def _whole(job: PipelineJob, before: Tensor) -> Built:
    torch.set_rng_state(before)
    deferred = build_whole(job.build)
    require_trainable(deferred.model.named_parameters())
    return Built(deferred, units_of(deferred.model), before)


def agree_on_cuts(
    options: spec.Pipeline, context: Context, job: PipelineJob, built: Built, places: Places
) -> tuple[Built, Cuts]:
    """Worker 0 measures and cuts; all take its cuts, and build the model as it did."""
    store = context.store
    assert store is not None
    if context.identity.rank == 0:
        try:
            built, cuts = _decide(options, context, job, built, places)
        except Exception as error:
            _tell(store, _without_cuts(error))
            raise
        _tell(store, cuts)
        return built, cuts
    try:
        cuts = msgspec.json.decode(store.get(KEY), type=Cuts)
    except RuntimeError as error:
        waited = context.deadline_seconds
        raise DeadlineError("learning where stages begin", waited, ["worker0"]) from error
    if cuts.refused is not None:
        raise SpecError(*cuts.refused)
    if cuts.failed:
        raise ExchangeError(f"worker0 could not cut the model into stages: {cuts.failed}")
    if cuts.is_whole and not built.deferred.is_whole:
        built = _whole(job, built.before)
    return built, cuts


def _tell(store: Store, cuts: Cuts) -> None:
    store.set(KEY, msgspec.json.encode(cuts).decode())


def _without_cuts(error: Exception) -> Cuts:
    """What the others must know to end as worker 0 does."""
    if isinstance(error, SpecError):
        return Cuts(refused=(error.where, error.problem, error.fix))
    return Cuts(failed=(str(error).splitlines() or [type(error).__name__])[0])


def _decide(
    options: spec.Pipeline, context: Context, job: PipelineJob, built: Built, places: Places
) -> tuple[Built, Cuts]:
    compared = _compared(options, context, job, built)
    try:
        measured = measure(built.deferred, built.units, job, context.device, compared)
    except SpecError:
        if built.deferred.is_whole or compared is None:
            raise
        built = _whole(job, built.before)  # what was built part by part may be to blame
        measured = measure(built.deferred, built.units, job, context.device, compared)
    chosen = [*_first_of_stages(options, job, measured, places), len(measured)]
    stages = [measured[a:b] for a, b in pairwise(chosen)]
    return built, Cuts(
        starts=[stage[0].start for stage in stages],
        seconds=[sum(one.cost.seconds for one in stage) for stage in stages],
        shapes=[stage[-1].shape for stage in stages],
        sees_batch=[built.units[one.start].words for one in measured if one.sees_batch],
        is_whole=built.deferred.is_whole,
        is_compared=compared is not None,
    )


def _first_of_stages(
    options: spec.Pipeline, job: PipelineJob, measured: Sequence[MeasuredUnits], places: Places
) -> list[int]:
    pipe = places.pipe
    if pipe.stages > len(measured):
        raise too_few(len(measured), pipe.workers, pipe.loops, places.replicas)
    limit = options.memory_bytes
    return cut(
        [one.cost for one in measured],
        pieces=pipe.stages,
        held=[in_flight(pipe, stage) for stage in range(pipe.stages)],
        weight_factor=job.weight_factor,
        memory_bytes=None if limit is None else limit // pipe.loops,
    )


def _compared(
    options: spec.Pipeline, context: Context, job: PipelineJob, built: Built
) -> nn.Module | None:
    """The whole model once more, to compare its units with; None where memory is too short."""
    room = _free_bytes(context.device) // 4
    if options.memory_bytes is not None:
        room = min(room, options.memory_bytes // 2)
    if built.weight_bytes > room:
        return None
    with torch.random.fork_rng([]):
        torch.set_rng_state(built.before)
        return job.build().to(context.device).train()


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def idle(pipe: Pipe, seconds: Sequence[float]) -> float:
    """What the schedule leaves workers to wait, with stages that take these seconds."""
    part = {"forward": FORWARD_FRACTION, "backward": 1 - FORWARD_FRACTION}
    return idle_fraction(pipe, lambda turn: part[turn.kind] * seconds[turn.stage])
