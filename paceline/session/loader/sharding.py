"""`shard`: this worker's part of every batch of a torch DataLoader.

Workers together see what the plain loader would show, batch by batch; `portions` and `streams` say
how batches are divided, `order` which samples they hold, `handing` what each counts.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any
from zlib import crc32

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.distributed import DistributedSampler

from paceline.data.sampling import split
from paceline.errors import SpecError
from paceline.session.loader.ledger import Pass, Use
from paceline.session.loader.order import Order
from paceline.session.loader.portions import (
    IndexPortions,
    Portions,
    are_equal,
    division,
    gradient_scale,
    own_size,
)
from paceline.session.loader.stream_portions import ReadyPortions, StreamPortions
from paceline.session.session import Session
from paceline.session.start import current

__all__ = ["ShardedLoader", "division", "gradient_scale", "shard"]


class ShardedLoader(DataLoader[Any]):
    """This worker's part of another loader, whose settings it has.

    `batch_size` is this worker's and `batch_sampler` gives this worker's indices; `dataset` and
    `sampler` are the whole's.
    """

    def __init__(self, plain: DataLoader[Any], portions: Portions, session: Session) -> None:
        # All that the plain loader knows, what scripts and subclasses added to it too; torch
        # forbids only to set these by assignment.
        vars(self).update(vars(plain))
        vars(self)["batch_size"] = portions.batch_size
        if isinstance(portions, IndexPortions):
            place = "sampler" if plain.batch_sampler is None else "batch_sampler"
            vars(self)[place] = portions
        elif plain.batch_sampler is not None and portions.batch_size:
            whose = BatchSampler(plain.sampler, portions.batch_size, plain.drop_last)
            vars(self)["batch_sampler"] = whose
        self._plain, self._portions, self._session = plain, portions, session
        self._use = Use(session.ledger.num_loaders)
        self._kept: tuple[tuple[int, ...], DataLoader[Any]] | None = None
        """The reader whose processes continue between passes, and for which members it was made."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        session, sharing = self._session, self._session.participants.sharing
        if self._kept is not None and self._kept[0] == sharing:
            reader = self._kept[1]
        else:
            reader = self._portions.reader(self)
        if self.persistent_workers:
            self._kept = (sharing, reader)
        portions = self._portions.begin(reader)
        alone = session.workers == 1
        return Pass(portions, self._portions, session.steps, session.ledger, self._use, alone=alone)

    def __len__(self) -> int:
        return len(self._portions)

    def set_epoch(self, epoch: int) -> None:
        """Tell the number of the next pass to what draws the samples.

        It decides the order where `shard` was given a seed, or the script's own sampler or data
        set asks for it; a plain `shuffle=True` draws anew at each pass whatever its number.
        """
        self._portions.set_epoch(epoch)
        for part in (self._plain.sampler, self._plain.batch_sampler, self._plain.dataset):
            follow = getattr(part, "set_epoch", None)
            if follow is not None:
                follow(epoch)


def shard(
    loader: DataLoader[Any],
    *,
    batch: str = "per-worker",
    shares: list[float] | None = None,
    seed: int | None = None,
) -> ShardedLoader:
    """Return this worker's part of `loader`.

    `batch="per-worker"`: the loader's batch size is each worker's, so the global batch grows with
    the workers. `batch="global"`: it is the size over all workers. Either way the workers' parts
    of step i are together the i-th batch that the plain loader would draw with that size, in the
    order that worker 0's random numbers give; with `seed`, shuffling depends on it alone.
    `shares` gives workers uneven parts, one weight each.

    Gradients of uneven parts are scaled so that their average is that of the whole batch, for
    losses that are means over samples. The batch drawn last is the one whose scale holds.
    """
    session = current()
    _check(loader, batch)
    shares = [1.0] * session.workers if shares is None else [float(share) for share in shares]
    if len(shares) != session.workers:
        problem = f"{len(shares)} shares for {session.workers} workers."
        raise SpecError("shard", problem, "give one weight per worker.")
    split(1, shares)  # refuses what divides nothing
    ledger = session.ledger
    ledger.num_loaders += 1
    name = f"shard/{ledger.num_loaders}"
    if what := _cannot_be_entered(loader, ledger.num_loaders):
        _refuse_joined(session, what)
    _compare(session, name, _describe(loader, batch))
    portions = _portions(loader, session, name, batch == "per-worker", shares, seed)
    ledger.is_needed |= not portions.is_even
    return ShardedLoader(loader, portions, session)


def _portions(
    loader: DataLoader[Any],
    session: Session,
    name: str,
    per_worker: bool,
    shares: list[float],
    seed: int | None,
) -> Portions:
    """The way to divide this loader's batches."""
    participants, values, positions = session.participants, session.values, session.positions
    draw_by = partial(
        Order, name=name, participants=participants, values=values, positions=positions, seed=seed
    )
    times = session.workers if per_worker else 1
    if isinstance(loader.dataset, IterableDataset):
        if seed is not None:
            problem = f"seed = {seed}, but the data set is a stream with an order of its own."
            raise SpecError("shard", problem, "leave out seed, and seed the data set itself.")
        if loader.batch_size is None:
            return ReadyPortions(loader, participants, shares, None, deal=per_worker)
        total = loader.batch_size * times
        return StreamPortions(loader, name, participants, values, shares, total)
    # A sampler that yields lists of indices to a data set which takes lists is a batch sampler.
    takes_lists = loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler)
    batches = loader.sampler if takes_lists else loader.batch_sampler
    if batches is None:
        order = draw_by(BatchSampler(loader.sampler, 1, False))
        return ReadyPortions(loader, participants, shares, order, deal=per_worker)
    if type(batches) is not BatchSampler:  # the script's own, whose batches may have any size
        order = draw_by(batches, join=times)
        is_even = session.workers == 1
        return IndexPortions(
            order,
            participants,
            positions,
            shares,
            batches=batches,
            batch_size=None,
            is_even=is_even,
        )
    total = batches.batch_size * times
    samples = _count(batches.sampler)
    _check_sizes(session, batches, samples, total)
    enlarged = BatchSampler(batches.sampler, total, batches.drop_last)
    rest = 0 if batches.drop_last else 1 if samples is None else samples % total
    return IndexPortions(
        draw_by(enlarged),
        participants,
        positions,
        shares,
        batches=batches,
        batch_size=own_size(total, shares, participants),
        is_even=are_equal(total, rest, shares),
    )


def _check(loader: Any, batch: str) -> None:
    if batch not in ("per-worker", "global"):
        raise SpecError("shard", f'batch = "{batch}".', 'write "per-worker" or "global".')
    kind = type(loader).__name__
    if isinstance(loader, ShardedLoader):
        raise SpecError("shard", "this loader is sharded already.", "call shard once for each.")
    if not isinstance(loader, DataLoader):
        problem = f"it was given a {kind}, and divides a torch.utils.data.DataLoader."
        fix = "put the data into a DataLoader, or take a part of it by paceline.init().rank."
        raise SpecError("shard", problem, fix)
    if type(loader).__iter__ is not DataLoader.__iter__:
        problem = f"{kind} iterates in a way of its own, which shard cannot divide."
        fix = "pass a torch DataLoader over the same data set, or divide it by rank yourself."
        raise SpecError("shard", problem, fix)
    samplers = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        problem = "the loader has a DistributedSampler, which divides the samples once more."
        fix = "leave the sampler out (shuffle=True in its place); shard divides every batch."
        raise SpecError("shard", problem, fix)


def _cannot_be_entered(loader: DataLoader[Any], number: int) -> str:
    """Return why a joining worker cannot continue inside this loader; empty for the one loader that
    is trained on, where it finds the place of the others."""
    if number > 1:
        return "a second loader"
    plain = type(loader.batch_sampler) is BatchSampler
    sampler = loader.batch_sampler.sampler if plain else loader.sampler  # type: ignore[union-attr]
    is_known = type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler:
        is_known = sampler.generator is None
    return "" if plain and is_known else f"a loader with {type(sampler).__name__}"


def _refuse_joined(session: Session, what: str) -> None:
    """Let no worker join a script that shards this; a worker that joined already must not train."""
    session.join_obstacle.close(f"the job's script shards {what}")
    if session.participants.has_joined:
        problem = f"this worker joined a job that ran, and cannot go on inside {what}."
        fix = "shard one DataLoader, shuffled or in order, whose generator is torch's own."
        raise SpecError("shard", problem, fix)


def _count(samples: Any) -> int | None:
    """Return how many there are, or None."""
    try:
        return len(samples)
    except TypeError:
        return None


def _check_sizes(session: Session, batches: BatchSampler, samples: int | None, total: int) -> None:
    if samples is not None and batches.drop_last and batches.batch_size <= samples < total:
        problem = (
            f"{samples} samples do not make one global batch of {total} ({batches.batch_size} on "
            f"each of {session.workers} workers), and drop_last leaves out what is less."
        )
        fix = 'use drop_last=False, a smaller batch, or batch="global".'
        raise SpecError("shard", problem, fix)
    if total < session.workers:
        session.note(f"batches of {total} leave some of {session.workers} workers without a sample")


def _compare(session: Session, name: str, own: str) -> None:
    theirs = session.values.agree(name, own, kept=True)
    if theirs != own:
        problem = f"worker {session.rank} divides {own}, where worker 0 divides {theirs}."
        fix = (
            "shard the same loaders in the same order on every worker; call torch.manual_seed with "
            "one number on all before random_split or whatever else chooses samples."
        )
        raise SpecError("shard", problem, fix)


def _describe(loader: DataLoader[Any], batch: str) -> str:
    """Return in words what must be the same on every worker."""
    dataset, chosen = loader.dataset, ""
    while isinstance(dataset, Subset):
        number = crc32(repr(list(dataset.indices)).encode())
        chosen += f", chosen as {number:08x}"
        dataset = dataset.dataset
    samples = _count(loader.dataset)
    count = "a stream" if samples is None else f"{samples} samples"
    size = "" if loader.batch_size is None else f" of {loader.batch_size}"
    drop = ", without the last" if loader.drop_last else ""
    return (
        f"{count} of {type(dataset).__name__}{chosen} by {type(loader.sampler).__name__} "
        f"in {batch} batches{size}{drop}"
    )
