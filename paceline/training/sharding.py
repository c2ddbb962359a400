"""`shard`: this worker's part of every batch of a torch DataLoader."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from paceline.data.sampling import GlobalBatches, split
from paceline.errors import SpecError
from paceline.training.session import Session, current


class _OwnIndices:
    """The batch sampler: this worker's slice of each global batch of one epoch."""

    def __init__(self, batches: GlobalBatches, session: Session, shares: list[float]) -> None:
        self._batches, self._session, self._shares = batches, session, shares
        self.epoch = 0
        self.scales: deque[float] = deque()
        """What the gradients of the batches drawn so far are multiplied by, in order."""

    def __len__(self) -> int:
        return self._batches.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self.epoch * len(self)
        for step in range(first, first + len(self)):
            indices = self._batches.indices(step)
            there, place = division(self._shares, self._session)
            self.scales.append(gradient_scale(len(indices), there, place))
            yield [int(index) for index in indices[split(len(indices), there)[place]]]


class ShardedLoader:
    """Iterates like the loader it was made from; each pass is the next epoch."""

    def __init__(self, loader: DataLoader[Any], sampler: _OwnIndices, session: Session) -> None:
        self._loader, self._sampler, self._session = loader, sampler, session

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._sampler.epoch += 1
        self._sampler.scales.clear()
        batches, clock = iter(self._loader), self._session.clock
        while True:
            clock.enter("input")
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                clock.enter("other")
            self._session.scale_gradients(self._sampler.scales.popleft())
            yield batch


def shard(
    loader: DataLoader[Any],
    *,
    batch: str = "per-worker",
    shares: list[float] | None = None,
    seed: int = 0,
) -> ShardedLoader:
    """Return this worker's part of `loader`.

    `batch="per-worker"`: the loader's batch size is each worker's, so the global batch grows with
    the workers. `batch="global"`: it is the size over all workers. Either way the global batch of
    step i is drawn from (seed, i) alone. `shares` gives workers uneven parts, one weight each;
    gradients are scaled so that the result is the whole batch's.
    """
    session = current()
    if batch not in ("per-worker", "global"):
        raise SpecError("shard", f'batch = "{batch}".', 'write "per-worker" or "global".')
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        problem = "this loader has no samples to count (an iterable data set or no batch size)."
        raise SpecError("shard", problem, "split the stream yourself by paceline.init().rank.")
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        problem = f"the loader draws its samples with {type(loader.sampler).__name__}."
        raise SpecError("shard", problem, "use shuffle=True or False; shard() draws the order.")
    shares = [1.0] * session.workers if shares is None else shares
    if len(shares) != session.workers:
        problem = f"{len(shares)} shares for {session.workers} workers."
        raise SpecError("shard", problem, "give one weight per worker.")
    total = loader.batch_size * (session.workers if batch == "per-worker" else 1)
    shuffle = isinstance(loader.sampler, RandomSampler)
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    batches = GlobalBatches(num_samples, total, seed=seed, shuffle=shuffle)
    sampler = _OwnIndices(batches, session, shares)
    sampler.epoch = -1
    own = DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )
    return ShardedLoader(own, sampler, session)


def division(shares: Sequence[float], session: Session) -> tuple[list[float], int]:
    """The shares of the workers that are there, and this worker's place among them."""
    return [shares[rank] for rank in session.members], session.members.index(session.rank)


def gradient_scale(global_batch: int, shares: Sequence[float], rank: int) -> float:
    """The factor of a worker's mean gradient that makes an equal average the batch's mean."""
    own = split(global_batch, shares)[rank]
    return float((own.stop - own.start) * len(shares) / global_batch)
