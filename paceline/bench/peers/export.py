"""Write what a peer trains on: the samples of every step and the first weights, as plain arrays.

They come from our own data sets and models, so that a peer's loss curve can be laid over ours.
"""

from pathlib import Path

import msgspec
import numpy as np
import torch

from paceline import data, spec
from paceline.bench.peers.job import JOB, PeerJob
from paceline.builtin.batches import open_data
from paceline.builtin.loop import build_model
from paceline.errors import SpecError


def export(
    experiment: spec.Experiment, folder: Path, *, addresses: tuple[str, ...], threads: int
) -> PeerJob:
    """Fill `folder` for one training of `experiment`."""
    workload, cluster = experiment.workload, experiment.cluster
    _refuse(workload, cluster)
    dataset = open_data(workload)
    torch.manual_seed(workload.seed)
    model = build_model(workload, dataset)
    weights = {name: _array(value) for name, value in model.named_parameters()}
    np.savez(folder / "weights.npz", **weights)  # type: ignore[arg-type]
    total = workload.global_batch_for(cluster.workers)
    steps = workload.num_steps(cluster.workers, len(dataset))
    _write_samples(dataset, workload, total, steps, folder)
    parts = data.split(total, [1.0] * cluster.workers)
    job = PeerJob(
        model=workload.model,
        input_shape=dataset.input_shape,
        num_classes=dataset.num_classes,
        steps=steps,
        threads=threads,
        optimizer=workload.optimizer,
        parts=tuple((part.start, part.stop) for part in parts),
        addresses=addresses,
        num_samples=len(dataset),
    )
    (folder / JOB).write_bytes(msgspec.json.encode(job))
    dataset.close()
    return job


def _refuse(workload: spec.Workload, cluster: spec.Cluster) -> None:
    """A peer that trained something else would be no comparison."""
    asked = {
        "a learning-rate schedule": workload.schedule != spec.Schedule(),
        "gradient accumulation": workload.accumulate != 1,
        "gradient clipping": bool(workload.clip_norm),
        "bfloat16": workload.precision == "bfloat16",
        "uneven shares": bool(cluster.shares),
        "containers": bool(cluster.container),
        "resuming": bool(workload.resume),
    }
    for what, wanted in asked.items():
        if wanted:
            raise SpecError("peers", f"peers train without {what}.", "leave it out to compare.")


def _write_samples(
    dataset: data.Dataset, workload: spec.Workload, total: int, steps: int, folder: Path
) -> None:
    """Every sample that any step uses, once; pictures with their channels last."""
    batches = data.GlobalBatches(len(dataset), total, seed=workload.seed, shuffle=dataset.shuffle)
    wanted = np.stack([batches.indices(step) for step in range(steps)])
    distinct, order = np.unique(wanted, return_inverse=True)
    inputs, targets = dataset.batch(distinct)
    if inputs.ndim == 4:
        inputs = inputs.permute(0, 2, 3, 1)
    samples, labels = _array(inputs), _array(targets)
    np.save(folder / "samples.npy", samples)
    np.save(folder / "targets.npy", labels)
    np.save(folder / "order.npy", order.reshape(wanted.shape))
    samples.tofile(folder / "samples.raw")  # TensorFlow's workers read these inside their graph
    labels.tofile(folder / "targets.raw")


def _array(value: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    return np.ascontiguousarray(value.detach().cpu().numpy())
