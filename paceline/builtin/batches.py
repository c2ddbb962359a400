"""The batches of a built-in workload: its data set, and this worker's part of each global batch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from paceline import data, models, spec
from paceline.architectures.pipeline import PipelineModel
from paceline.collectives.group import Group
from paceline.data.scatter import ScatterLoader, describe
from paceline.session.loader.portions import division
from paceline.session.session import Session

READING = -2
"""The part of the store for the samples that worker 0 sends: no call of `distribute` has it."""


def open_data(workload: spec.Workload, *, train: bool = True) -> data.Dataset:
    """Open the data set of a workload; synthetic samples take the shape the model expects."""
    described = models.info(workload.model)
    shape = workload.input_shape or None
    if shape is None and described is not None and workload.data == "synthetic":
        shape = described.input_shape
    return data.open(
        workload.data,
        data_dir=Path(workload.data_dir) if workload.data_dir else None,
        train=train,
        seed=workload.seed,
        input_shape=shape,
        tokens=described.tokens if described is not None else False,
        cache=workload.cache,
    )


def source(
    workload: spec.Workload,
    dataset: data.Dataset,
    shares: list[float],
    session: Session,
    device: torch.device,
) -> data.BatchSource:
    """Return the source of this worker's batches, read by itself or sent by worker 0."""
    total = workload.global_batch_for(len(shares))
    batches = data.GlobalBatches(len(dataset), total, seed=workload.seed, shuffle=dataset.shuffle)
    if workload.reading == "each" or session.workers == 1:

        def own_part(count: int) -> slice:
            there, place = division(shares, session.participants)
            return data.split(count, there)[place]

        if device.type == "cuda":
            return data.DeviceLoader(dataset, batches, own_part, device)
        return data.Loader(dataset, batches, own_part)
    group = Group(session.context(torch.device("cpu"), READING), "gloo")
    own = dataset if session.rank == 0 else None
    slices: list[Callable[[int], slice]] = [
        data.part_of(rank, shares) for rank in range(session.workers)
    ]
    return ScatterLoader(own, describe(own, group), batches, slices, group)


def source_of_stages(
    workload: spec.Workload,
    dataset: data.Dataset,
    session: Session,
    model: PipelineModel,
    device: torch.device,
) -> data.BatchSource:
    """Return the source for a worker of a pipeline: all take the same samples, and stages in the
    middle need none."""
    total = workload.global_batch_for(session.workers)
    batches = data.GlobalBatches(len(dataset), total, seed=workload.seed, shuffle=dataset.shuffle)
    if not model.reads:
        dataset = data.open("synthetic", input_shape=(1,), num_samples=len(dataset))
    if device.type == "cuda":
        return data.DeviceLoader(dataset, batches, model.samples_of, device)
    return data.Loader(dataset, batches, model.samples_of)


def timed(
    batches: Iterator[data.Batch], session: Session, device: torch.device
) -> Iterator[data.Batch]:
    """Yield the batches on the device; the wait for each and its way there count as input."""
    while True:
        session.clock.enter("input")
        batch = next(batches, None)
        if batch is None:
            return
        inputs, targets = (part.to(device, non_blocking=True) for part in batch)
        session.clock.enter("other")
        yield inputs, targets
