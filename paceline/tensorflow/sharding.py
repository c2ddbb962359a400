"""`shard` for TensorFlow: this worker's part of a tf.data set, of arrays, or of a PyDataset.

With tf.data the workers' parts of a step are together the batch that one worker would have had.
"""

from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from paceline.errors import SpecError
from paceline.session.session import Session
from paceline.session.start import current

_nominal: WeakKeyDictionary[Session, float] = WeakKeyDictionary()
"""Samples of an equal part of a full batch, of the first data set that was divided."""


def nominal_size(session: Session) -> float:
    """Samples that count as 1: an equal part of a full batch; 0 where nobody divided batches."""
    return _nominal.get(session, 0.0)


def note_batch(session: Session, total: int) -> None:
    """Full batches have `total` samples over all workers; the first to say so counts."""
    _nominal.setdefault(session, total / session.workers)


def shard(*data: Any, batch: str = "per-worker") -> Any:
    """Return this worker's part of a batched `tf.data.Dataset`, a `PyDataset`, or of arrays.

    `batch="per-worker"`: a batch of the data set is each worker's, so the global batch grows with
    the workers. `batch="global"`: it is the size over all workers. Arrays (any number of them, of
    one length) are given to `fit` with a batch size, which is each worker's: every n-th sample
    is this worker's, so that without shuffling the workers' batches are together the plain ones.
    """
    session = current()
    if batch not in ("per-worker", "global"):
        raise SpecError("shard", f'batch = "{batch}".', 'write "per-worker" or "global".')
    session.ledger.num_loaders += 1
    if len(data) == 1 and isinstance(data[0], tf.data.Dataset):
        return _dataset(data[0], session, batch)
    if len(data) == 1 and isinstance(data[0], keras.utils.PyDataset):
        return ShardedPyDataset(data[0], session, batch)
    arrays = [_array(each) for each in data]
    if not arrays or len({len(array) for array in arrays}) != 1:
        problem = f"it was given {len(data)} arrays that are not of one length."
        raise SpecError("shard", problem, "write x, y = shard(x, y) with one y for each x.")
    if batch == "global":
        problem = 'batch = "global", and arrays know no batches.'
        fix = "divide the batch_size given to fit by paceline.tensorflow.workers()."
        raise SpecError("shard", problem, fix)
    parts = tuple(_every_nth(array, session) for array in arrays)
    return parts if len(parts) > 1 else parts[0]


def _array(data: Any) -> Any:
    if isinstance(data, np.ndarray | tf.Tensor) or hasattr(data, "__array__"):
        return data
    problem = f"it was given a {type(data).__name__}."
    fix = "pass a tf.data.Dataset, a keras.utils.PyDataset or arrays."
    raise SpecError("shard", problem, fix)


def _every_nth(array: Any, session: Session) -> Any:
    workers, left = session.workers, len(array) % session.workers
    if left:
        session.note(f"{left} of {len(array)} samples are left out: workers take equal numbers.")
    return array[session.rank : len(array) - left : workers]


def _dataset(dataset: Any, session: Session, batch: str) -> Any:
    workers, rank = session.workers, session.rank
    if workers == 1:
        return dataset
    size = _batch_size(dataset)
    total = size if batch == "global" else size * workers
    if total < workers:
        problem = f"batches of {total} cannot be divided among {workers} workers."
        raise SpecError("shard", problem, 'use larger batches, or batch="per-worker".')
    note_batch(session, total)
    whole = dataset if batch == "global" else dataset.rebatch(total)

    def part(*element: Any) -> Any:
        first, last = _bounds(tf.shape(tf.nest.flatten(element)[0])[0], rank, workers)
        cut = tf.nest.map_structure(lambda values: values[first:last], element)
        return cut if isinstance(whole.element_spec, tuple) else cut[0]

    parts = whole.map(part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return parts.prefetch(tf.data.AUTOTUNE)


def _bounds(samples: Any, rank: int, workers: int) -> tuple[Any, Any]:
    """Where this worker's part of a batch begins and ends.

    Of fewer samples than workers everybody takes all: the mean is the same.
    """
    is_small = tf.cast(samples < workers, tf.int32)
    first, last = samples * rank // workers, samples * (rank + 1) // workers
    return first * (1 - is_small), last + (samples - last) * is_small


def _batch_size(dataset: Any) -> int:
    first = tf.nest.flatten(dataset.element_spec)[0]
    if first.shape.rank is not None and first.shape.rank and first.shape[0]:
        return int(first.shape[0])
    inside: Any = dataset
    while inside is not None:
        size = getattr(inside, "_batch_size", None)
        if size is not None:
            return int(tf.get_static_value(size) or size)
        inside = getattr(inside, "_input_dataset", None)
    for element in dataset.take(1):  # the first batch is the largest
        values = tf.nest.flatten(element)[0]
        if values.shape.rank:
            return int(values.shape[0])
    problem = "the data set has no batches."
    raise SpecError("shard", problem, "call data.batch(32) before shard.")


class ShardedPyDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """This worker's part of a `keras.utils.PyDataset`."""

    def __init__(self, plain: Any, session: Session, batch: str) -> None:
        super().__init__(plain.workers, plain.use_multiprocessing, plain.max_queue_size)
        self._plain, self._rank, self._count = plain, session.rank, session.workers
        self._divides = batch == "global"
        left = 0 if self._divides else len(plain) % self._count
        if left:
            session.note(
                f"{left} of {len(plain)} batches are left out: workers take equal numbers."
            )

    def __len__(self) -> int:
        batches = len(self._plain)
        return batches if self._divides else batches // self._count

    def __getitem__(self, index: int) -> Any:
        if not self._divides:
            return self._plain[index * self._count + self._rank]
        whole = self._plain[index]
        bounds = _bounds(len(keras.tree.flatten(whole)[0]), self._rank, self._count)
        first, last = map(int, bounds)
        return keras.tree.map_structure(lambda values: values[first:last], whole)

    def on_epoch_begin(self) -> None:
        self._plain.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._plain.on_epoch_end()
