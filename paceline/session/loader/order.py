"""The global batches of a sharded loader: what the plain loader would draw, on every worker alike.

Each worker draws with its own sampler, so that its random numbers go on as in the plain script;
what worker 0 drew is what counts. For `shuffle=True` only the seed of a pass travels, for a sampler
of the user's the indices themselves: it may draw from any source of random numbers.
"""

import ast
import time
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

import msgspec
import torch
from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.errors import ExchangeError, JobOver, SpecError
from paceline.session.loader.positions import Position
from paceline.session.session import Session
from paceline.session.stores import DEADLINE_SECONDS, POLL_SECONDS, unanswered

Group = list[list[Any]]
"""What a step is made of: one list of indices, or one for each worker."""


class Drawn(NamedTuple):
    """A group, and where it stands among all of a job."""

    position: Position
    group: Group


DRAWN_AT_ONCE = (SubsetRandomSampler, WeightedRandomSampler)
"""Their passes are drawn whole before the first index is out, and may travel whole."""


class Order:
    """The groups of indices of each pass, in order.

    `source` yields lists of indices, `join` of which make a group. With `seed` a shuffled pass is
    drawn from (seed, epoch) alone, and nobody is asked.
    """

    def __init__(
        self,
        source: Iterable[list[Any]],
        session: Session,
        name: str,
        *,
        join: int = 1,
        seed: int | None = None,
    ) -> None:
        self._source, self._session, self._name, self._join = source, session, name, join
        sampler = source.sampler if type(source) is BatchSampler else None
        self._is_fixed = type(sampler) is SequentialSampler
        self._shuffler = sampler if type(sampler) is RandomSampler else None
        self._at_once = type(sampler) in DRAWN_AT_ONCE
        self._seed, self._epoch, self._last_seed = seed, 0, 0
        self._passes = 0
        self._begins: Position | None = None
        """Where one who joined does."""
        if seed is not None and self._shuffler is None and not self._is_fixed:
            drawn_by = type(source if sampler is None else sampler).__name__
            fix = f"leave out seed, and seed {drawn_by} itself."
            raise SpecError("shard", f"seed = {seed}, but {drawn_by} draws the order.", fix)

    def __len__(self) -> int:
        return -(-len(self._source) // self._join)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """The next pass is `epoch`. It decides the order where a seed was given."""
        self._epoch = epoch

    def groups(self) -> Iterator[Drawn]:
        """One pass; the pass begins when the first group is asked for.

        One who joined leaves out what the others had done before.
        """
        number, self._passes = self._passes, self._passes + 1
        epoch, self._epoch = self._epoch, self._epoch + 1
        begins = (0, 0)
        if self._session.has_joined:
            begins = self._begins = self._begins or self._session.positions.find(len(self))
        if number < begins[0]:
            return
        skipped = begins[1] if number == begins[0] else 0
        drawn = islice(self._drawn(number, epoch), skipped, None)
        for index, group in enumerate(drawn, start=skipped):
            yield Drawn((number, index), group)

    def _drawn(self, number: int, epoch: int) -> Iterator[Group]:
        if self._shuffler is not None and (self._session.workers > 1 or self._seed is not None):
            generator = self._generator(self._shuffler, f"{self._name}/{number}", epoch)
            yield from self._shuffled(self._shuffler, generator)
        elif self._is_fixed or self._session.workers == 1:
            yield from self._joined(self._source)
        else:
            yield from self._from_worker_0(f"{self._name}/{number}")

    def _joined(self, batches: Iterable[list[Any]]) -> Iterator[Group]:
        drawn = iter(batches)
        while group := [list(batch) for batch in islice(drawn, self._join)]:
            yield group

    def _shuffled(self, sampler: RandomSampler, generator: torch.Generator) -> Iterator[Group]:
        assert isinstance(self._source, BatchSampler), "a shuffled order is made of plain batches"
        alike = RandomSampler(
            sampler.data_source, sampler.replacement, sampler.num_samples, generator
        )
        batches = BatchSampler(alike, self._source.batch_size, self._source.drop_last)
        yield from self._joined(batches)

    def _generator(self, sampler: RandomSampler, key: str, epoch: int) -> torch.Generator:
        """What the pass is drawn with, at the state it has on worker 0."""
        if self._seed is not None:
            return torch.Generator().manual_seed(self._seed + epoch)
        if sampler.generator is not None:
            generator: torch.Generator = sampler.generator
            state = self._drawn_by_first(key, generator.get_state().numpy().tobytes().hex())
            generator.set_state(torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8))
            return generator
        drawn = int(torch.empty((), dtype=torch.int64).random_().item())  # as RandomSampler does
        if 0 not in self._session.members and not self._session.has_successors:
            drawn = self._last_seed + 1  # all that the others have in common
        self._last_seed = int(self._drawn_by_first(key, str(drawn), kept=True))
        return torch.Generator().manual_seed(self._last_seed)

    def _drawn_by_first(self, key: str, own: str, *, kept: bool = False) -> str:
        """Worker 0 may be lost right now, and all who are left must still draw alike."""
        if self._session.survivors.go_on:
            return self._session.everyone.from_first(own)
        return agree(self._session, key, own, kept=kept)

    def _from_worker_0(self, key: str) -> Iterator[Group]:
        session, own = self._session, self._joined(self._source)
        for number in count():
            if session.leader != 0:
                raise ExchangeError(
                    f"worker 0 is lost, and it drew the samples with the script's own sampler "
                    f"({type(self._source).__name__}) for all workers."
                )
            groups = list(own) if self._at_once else list(islice(own, 1))
            text = encode(groups) if session.rank == 0 else ""
            groups = decode(agree(session, f"{key}/{number}", text))
            if not groups:
                return
            yield from groups


def agree(session: Session, key: str, value: str, *, kept: bool = False) -> str:
    """Worker 0's `value`, on every worker. The last to read it takes it out of the store, unless it
    is `kept` for those who join.

    Without worker 0 it is that of the next one; where no store outlives it there is nobody to ask,
    and each keeps its own.
    """
    store, leader = session.store, session.leader
    if session.workers == 1 or store is None or (leader != 0 and not session.has_successors):
        return value
    if session.rank == leader:
        store.set(key, value)
        return value
    try:
        if session.has_successors or session.has_joined:
            _await(session, store, key, leader)
        value = bytes(store.get(key)).decode()
        if not kept and store.add(f"{key}/read", 1) == session.workers - 1:
            store.delete_key(key)
            store.delete_key(f"{key}/read")
    except (DistError, RuntimeError) as error:
        operation = "the next batch of a sharded loader"
        raise unanswered(error, session.identity, operation) from error
    return value


def _await(session: Session, store: Store, key: str, leader: int) -> None:
    """Return when the leader's note is there. It was lost in just this step where it cannot be any
    more: some may have read what it had drawn, and some not."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not store.check([key]) and time.monotonic() < end:
        if session.has_joined and store.check([f"ended/worker{leader}"]):
            raise JobOver(
                f"worker{leader} has finished and draws no more batches: so has "
                f"{session.identity.name}, which joined the job."
            ).told()
        if leader in session.lost_from:
            raise ExchangeError(
                f"worker{leader} was lost in step {session.step}, just when it drew the next "
                "samples of a sharded loader for all workers."
            )
        time.sleep(POLL_SECONDS)


def encode(groups: list[Group]) -> str:
    """Groups as text: JSON, or Python literals where indices are more than whole numbers."""
    plain = [[[_plain(index) for index in batch] for batch in group] for group in groups]
    if all(type(index) is int for group in plain for batch in group for index in batch):
        return msgspec.json.encode(plain).decode()
    text = f"literal {plain!r}"
    try:
        same = decode(text) == plain
    except (ValueError, SyntaxError):
        same = False
    if not same:
        kinds = {type(index).__name__ for group in plain for batch in group for index in batch}
        problem = f"the sampler draws indices of type {', '.join(sorted(kinds))}."
        fix = "draw whole numbers, text or tuples of them, which can be told to other workers."
        raise SpecError("shard", problem, fix)
    return text


def decode(text: str) -> list[Group]:
    """The groups that `encode` wrote."""
    if text.startswith("literal "):
        groups: list[Group] = ast.literal_eval(text.removeprefix("literal "))
        return groups
    return msgspec.json.decode(text, type=list[Group])


def _plain(index: Any) -> Any:
    """Scalars of numpy and torch as Python's own."""
    return index.item() if getattr(index, "ndim", None) == 0 else index
