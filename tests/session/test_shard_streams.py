"""Streams and ready-made batches: the same promise where there are no indices to divide."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from paceline.errors import SpecError
from paceline.session.loader.stream_portions import mark, size_of, take
from tests.session.test_shard import together
from tests.support.workers import job


class Stream(IterableDataset):
    """0, 1, 2, …; processes that read it take turns, if `turns`."""

    def __init__(self, count: int, turns: bool = False, first: int = 0) -> None:
        self.count, self.turns, self.first = count, turns, first

    def __iter__(self):
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info and self.turns else (0, 1)
        return iter(range(self.first + start, self.first + self.count, step))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


def take_turns(number: int) -> None:
    """As in torch's documentation: the process changes its copy of the data set."""
    get_worker_info().dataset.turns = True


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("mode", ["global", "per-worker"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_workers_together_see_the_plain_batches_of_a_stream(workers, mode, drop_last):
    batch = 6 if mode == "global" else 2
    total = batch * (workers if mode == "per-worker" else 1)
    expected = [b.tolist() for b in DataLoader(Stream(37), total, drop_last=drop_last)]

    def make():
        return DataLoader(SizedStream(37), batch, drop_last=drop_last)

    assert together(workers, make, batch=mode) == [expected] * 2


@pytest.mark.parametrize("turns", ["never", "by itself", "told by worker_init_fn"])
@pytest.mark.parametrize("workers", [1, 3])
def test_processes_that_read_a_stream_show_the_plain_batches(workers, turns):
    """Copies of the stream where it does not look who reads, as with the plain loader."""
    told = take_turns if turns == "told by worker_init_fn" else None
    stream = Stream(25, turns=turns == "by itself")
    plain = DataLoader(stream, 4, num_workers=2, worker_init_fn=told)
    expected = [batch.tolist() for batch in plain]
    seen = []
    for worker in job(workers):
        loader = DataLoader(stream, 4, num_workers=2, worker_init_fn=told, persistent_workers=True)
        shard = worker.shard(loader, batch="global")
        one, two = ([(b.tolist(), worker.backward()) for b in shard] for _ in range(2))
        assert one == two
        seen.append(one)
    whole = [
        [i for batch, scale in parts if scale for i in batch] for parts in zip(*seen, strict=True)
    ]
    assert whole == expected


def test_a_stream_without_end():
    class Endless(IterableDataset):
        def __iter__(self):
            return itertools.count()

    parts = [
        [b.tolist() for b in itertools.islice(w.shard(DataLoader(Endless(), 2)), 3)] for w in job(2)
    ]
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    with pytest.raises(TypeError):
        len(job(1)[0].shard(DataLoader(Endless(), 2)))


def test_a_stream_that_divides_itself_or_is_not_seeded_is_refused():
    first, second = job(2)
    list(first.shard(DataLoader(Stream(8), 2)))
    shard = second.shard(DataLoader(Stream(8, first=1), 2))
    with pytest.raises(SpecError, match="one that divides itself by rank needs no shard"):
        list(shard)
    first, second = job(2)
    list(first.shard(DataLoader(Stream(0), 2)))
    with pytest.raises(SpecError, match="has other samples"):
        list(second.shard(DataLoader(Stream(8), 2)))
    with pytest.raises(SpecError, match="a stream with an order of its own"):
        first.shard(DataLoader(Stream(8), 2), seed=1)


def test_what_is_random_in_a_sample_does_not_make_it_another():
    picture = torch.rand(3, 4, 4)
    assert mark([(picture, 3)]) == mark([(picture + 0.1, 3)])
    assert mark([(picture, 3)]) != mark([(picture, 4)])
    assert mark([(picture, "a")]) != mark([(picture, "b")])
    assert mark([picture]) != mark([picture + 0.1])
    assert mark([picture.bfloat16()]) == mark([picture.bfloat16()])
    assert mark([{"x": np.ones(2)}]) != mark([{"x": np.zeros(2)}])
    assert mark([object()]) == mark([object()])


class Ready(Dataset):
    """Batches of several sizes, made by the data set; sample s of batch i is 10 i + s."""

    sizes = (3, 5, 2, 4, 1)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index):
        if index >= len(self.sizes):
            raise IndexError(index)
        return 10 * index + torch.arange(self.sizes[index])


class ReadyStream(IterableDataset):
    def __iter__(self):
        ready = Ready()
        return (ready[index] for index in range(len(ready)))


@pytest.mark.parametrize(("workers", "num_workers"), [(1, 0), (2, 2), (4, 0)])
def test_ready_made_batches_are_cut(workers, num_workers):
    def make():
        return DataLoader(Ready(), batch_size=None, shuffle=True, num_workers=num_workers)

    torch.manual_seed(1)
    expected = [batch.tolist() for batch in make()]
    assert together(workers, make, passes=1, batch="global") == [expected]


def test_ready_made_batches_of_a_stream_are_cut():
    expected = [batch.tolist() for batch in DataLoader(ReadyStream(), batch_size=None)]
    seen = []
    for worker in job(2):
        loader = worker.shard(DataLoader(ReadyStream(), batch_size=None), batch="global")
        seen.append([(batch.tolist(), worker.backward()) for batch in loader])
    assert [
        [i for part, s in step if s for i in part] for step in zip(*seen, strict=True)
    ] == expected


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_ready_made_batches_are_dealt_out(workers):
    def make():
        return DataLoader(Ready(), batch_size=None)

    batches = [batch.tolist() for batch in make()]
    expected = [list(itertools.chain(*batches[at : at + workers])) for at in range(0, 5, workers)]
    assert together(workers, make, passes=1) == [expected]
    worker = job(workers)[0]
    assert next(iter(worker.shard(make()))).tolist() == batches[0]


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_a_ready_made_batch_keeps_its_structure():
    x, y = torch.arange(6).reshape(3, 2), torch.arange(3)
    batch = {"pair": Pair(x, y), "names": ["a", "b", "c"], "list": [x, y.numpy()], "temperature": 2}
    assert size_of(batch) == 3
    part = take(batch, slice(1, 3), 3)
    assert type(part["pair"]) is Pair
    assert part["pair"].x.tolist() == [[2, 3], [4, 5]]
    assert part["names"] == ["b", "c"]
    assert [value.tolist() for value in part["list"]] == [[[2, 3], [4, 5]], [1, 2]]
    assert part["temperature"] == 2


@pytest.mark.parametrize("batch", ["text", {"x": 3}, (torch.ones(2), torch.ones(3)), object()])
def test_a_ready_made_batch_without_samples_is_refused(batch):
    with pytest.raises(SpecError, match="ready-made batch"):
        size_of(batch)
