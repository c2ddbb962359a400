"""The global batches of a sharded loader: what the plain loader would draw, on every worker alike.

Each worker draws with its own sampler, so that its random numbers continue as in the plain script;
what worker 0 drew is what counts. For `shuffle=True` only the seed of a pass travels, for a sampler
of the user's the indices themselves: it may draw from any source of random numbers.
"""

import ast
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

import msgspec
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.errors import ExchangeError, SpecError
from paceline.session.loader.positions import Position, Positions
from paceline.session.participants import Participants
from paceline.session.shared_values import SharedValues

Group = list[list[Any]]
"""The indices of a step: one list, or one for each worker."""


class Drawn(NamedTuple):
    """A group, and where it stands among all of a job."""

    position: Position
    group: Group


DRAWN_AT_ONCE = (SubsetRandomSampler, WeightedRandomSampler)
"""Their passes are drawn whole before the first index is out, and may travel whole."""


class Order:
    """The groups of indices of each pass, in order.

    `source` yields lists of indices, `join` of which make a group. With `seed` a shuffled pass is
    drawn from (seed, epoch) alone, without asking other workers.
    """

    def __init__(
        self,
        source: Iterable[list[Any]],
        name: str,
        participants: Participants,
        values: SharedValues,
        positions: Positions,
        *,
        join: int = 1,
        seed: int | None = None,
    ) -> None:
        self._source, self._name, self._join = source, name, join
        self._participants, self._values, self._positions = participants, values, positions
        sampler = source.sampler if type(source) is BatchSampler else None
        self._is_fixed = type(sampler) is SequentialSampler
        self._shuffler = sampler if type(sampler) is RandomSampler else None
        self._at_once = type(sampler) in DRAWN_AT_ONCE
        self._seed, self._epoch, self._last_seed = seed, 0, 0
        self._passes = 0
        self._begins: Position | None = None
        """The position at which a worker begins that joined."""
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
        """Yield the groups of one pass; the pass begins when the first group is asked for.

        One who joined leaves out what the others had done before.
        """
        number, self._passes = self._passes, self._passes + 1
        epoch, self._epoch = self._epoch, self._epoch + 1
        begins = (0, 0)
        if self._participants.has_joined:
            begins = self._begins = self._begins or self._positions.find(len(self))
        if number < begins[0]:
            return
        skipped = begins[1] if number == begins[0] else 0
        drawn = islice(self._drawn(number, epoch), skipped, None)
        for index, group in enumerate(drawn, start=skipped):
            yield Drawn((number, index), group)

    def _drawn(self, number: int, epoch: int) -> Iterator[Group]:
        if self._shuffler is not None and (
            self._participants.workers > 1 or self._seed is not None
        ):
            is_past = self._begins is not None and self._begins[0] == number and self._begins[1] > 0
            key = f"{self._name}/{number}"
            generator = self._generator(self._shuffler, key, epoch, is_past=is_past)
            yield from self._shuffled(self._shuffler, generator)
        elif self._is_fixed or self._participants.workers == 1:
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

    def _generator(
        self, sampler: RandomSampler, key: str, epoch: int, *, is_past: bool
    ) -> torch.Generator:
        """Return the generator of a pass, at the state it has on worker 0.

        `is_past`: the pass began before this worker joined.
        """
        if self._seed is not None:
            return torch.Generator().manual_seed(self._seed + epoch)
        if sampler.generator is not None:
            generator: torch.Generator = sampler.generator
            own = generator.get_state().numpy().tobytes().hex()
            state = self._values.agree_during_failure(key, own, is_past=is_past)
            generator.set_state(torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8))
            return generator
        drawn = int(torch.empty((), dtype=torch.int64).random_().item())  # as RandomSampler does
        if 0 not in self._participants.members and not self._values.outlive_leader:
            drawn = self._last_seed + 1  # all that the others have in common
        seed = self._values.agree_during_failure(key, str(drawn), kept=True, is_past=is_past)
        self._last_seed = int(seed)
        return torch.Generator().manual_seed(self._last_seed)

    def _from_worker_0(self, key: str) -> Iterator[Group]:
        participants, own = self._participants, self._joined(self._source)
        for number in count():
            if participants.leader != 0:
                raise ExchangeError(
                    f"worker 0 is lost, and it drew the samples with the script's own sampler "
                    f"({type(self._source).__name__}) for all workers."
                )
            groups = list(own) if self._at_once else list(islice(own, 1))
            text = encode(groups) if participants.rank == 0 else ""
            groups = decode(self._values.agree(f"{key}/{number}", text))
            if not groups:
                return
            yield from groups


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
