"""What all workers see together is what the plain loader shows, batch by batch."""

import gc
import random
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

from paceline.errors import SpecError
from paceline.launch import Identity
from paceline.session.participants import Participants
from tests.support.workers import Worker, job


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """A new loader is looked for among all objects there are; those of other tests are many."""
    gc.freeze()
    yield
    gc.unfreeze()


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


def show(loader, passes: int = 2) -> list[list[list[int]]]:
    """The batches of a plain loader, pass by pass."""
    return [[batch.tolist() for batch in loader] for _ in range(passes)]


def train(worker: Worker, loader, passes: int = 2) -> list[list[tuple[list[int], float]]]:
    """What one worker is given while it trains: each batch with what its gradients count."""
    return [[(batch.tolist(), worker.backward()) for batch in loader] for _ in range(passes)]


def together(workers: int, make, *, passes: int = 2, **options) -> list[list[list[int]]]:
    """The batches of all workers put together, and the promises every batch keeps."""
    seen = []
    for worker in job(workers):
        torch.manual_seed(1 if worker.rank == 0 else 1000 + worker.rank)
        loader = worker.shard(make(), **options)
        seen.append(train(worker, loader, passes))
        assert len(loader) == len(seen[-1][0])
        if loader._portions.is_even:
            assert {scale for one in seen[-1] for _, scale in one} <= {1.0}
    whole = []
    for parts_of_pass in zip(*seen, strict=True):
        whole.append([])
        for parts in zip(*parts_of_pass, strict=True):  # as many steps on every worker
            assert sum(scale for _, scale in parts) == pytest.approx(workers)
            assert all(batch for batch, _ in parts)  # a stand-in where a part is empty
            own = [batch if scale else [] for batch, scale in parts]
            total = sum(map(len, own))
            for batch, (_, scale) in zip(own, parts, strict=True):
                assert scale == pytest.approx(len(batch) * workers / total)
            whole[-1].append([index for batch in own for index in batch])
    return whole


SHARES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.7]), min_size=1, max_size=5).filter(sum)


@settings(deadline=None, max_examples=150)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    shares=SHARES,
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    mode=st.sampled_from(["global", "per-worker"]),
)
def test_workers_together_see_the_plain_batches(samples, batch, shares, drop_last, shuffle, mode):
    workers = len(shares)
    total = batch * (workers if mode == "per-worker" else 1)
    torch.manual_seed(1)
    plain = DataLoader(Numbers(samples), total, shuffle=shuffle, drop_last=drop_last)
    expected = show(plain)

    def make():
        return DataLoader(Numbers(samples), batch, shuffle=shuffle, drop_last=drop_last)

    if not expected[0] and samples >= batch:
        with pytest.raises(SpecError, match="do not make one global batch"):
            together(workers, make, batch=mode, shares=shares)
    else:
        assert together(workers, make, batch=mode, shares=shares) == expected


@pytest.mark.parametrize(
    ("workers", "mode", "sizes"),
    [
        *((n, "global", [16, 16, 5]) for n in (1, 2, 3, 4, 8)),
        (1, "per-worker", [16, 16, 5]),
        (2, "per-worker", [32, 5]),
        (4, "per-worker", [37]),
    ],
)
def test_the_last_partial_batch_is_kept(workers, mode, sizes):
    (batches,) = together(workers, lambda: DataLoader(Numbers(37), 16), passes=1, batch=mode)
    assert [len(batch) for batch in batches] == sizes


@pytest.mark.parametrize("num_workers", [0, 2])
def test_passes_follow_the_random_numbers_of_worker_0(num_workers):
    """Torch's own order, whatever the other workers' random numbers are."""

    def make():
        return DataLoader(Numbers(23), 6, shuffle=True, num_workers=num_workers)

    torch.manual_seed(1)
    expected = show(make())
    assert expected[0] != expected[1]
    assert together(3, make, batch="global") == expected


def test_random_numbers_of_every_worker_go_on_as_in_the_plain_script():
    def after(loader) -> float:
        torch.manual_seed(1)
        list(loader)
        return torch.rand(()).item()

    def make():
        return DataLoader(Numbers(23), 6, sampler=RandomSampler(Numbers(23)))

    alone = after(make())
    assert [after(worker.shard(make())) for worker in job(3)] == [alone] * 3
    weighted = DataLoader(Numbers(9), 2, sampler=WeightedRandomSampler(torch.rand(9), 12))
    alone = after(weighted)
    assert [after(worker.shard(weighted)) for worker in job(3)] == [alone] * 3


def test_a_loaders_own_generator_decides():
    def make(seed: int = 7):
        return DataLoader(
            Numbers(23), 6, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )

    expected = show(make())
    assert together(3, make, batch="global") == expected
    seeds = iter((7, 8, 9))  # only worker 0's counts
    assert together(3, lambda: make(next(seeds)), batch="global") == expected


def test_a_seed_makes_passes_a_function_of_their_number():
    def make():
        return DataLoader(Numbers(23), 6, shuffle=True)

    (zero, one) = together(1, make, seed=5, batch="global")
    assert zero != one
    assert together(3, make, seed=5, batch="global") == [zero, one]
    (worker,) = job(1)
    loader = worker.shard(make(), seed=5)
    loader.set_epoch(1)
    assert show(loader, 1) == [one]
    assert show(loader, 1) != [one]
    loader.set_epoch(0)
    assert show(loader, 1) == [zero]


class Coloured(Sampler):
    """Draws from three sources of random numbers, one of them its own."""

    def __init__(self, count: int) -> None:
        self.count, self.own = count, np.random.default_rng()

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        for _ in range(self.count):
            yield (
                random.randrange(10)
                + 10 * int(torch.randint(10, ()))
                + 100 * int(self.own.integers(10))
            )


class Buckets:
    """A batch sampler with batches of several sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self):
        order = np.random.permutation(sum(self.sizes)).tolist()
        for size in self.sizes:
            yield [order.pop() for _ in range(size)]


def remembered(sampler, seen: list):
    """The same sampler; what it draws is put into `seen`."""

    class Remembered(type(sampler)):
        def __iter__(self):
            seen.append([])
            for drawn in super().__iter__():
                seen[-1].append(drawn)
                yield drawn

    sampler.__class__ = Remembered
    return sampler


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler(torch.ones(1000), 19),
        lambda: SubsetRandomSampler(range(7, 26)),
        lambda: SubsetRandomSampler(torch.arange(7, 26)),
        lambda: [5, 3, 5, 8, 1],
    ],
)
def test_samplers_of_torch_draw_as_in_the_plain_script(workers, make):
    def loader():
        return DataLoader(Numbers(1000), 5, sampler=make())

    torch.manual_seed(1)
    expected = show(loader())
    assert together(workers, loader, batch="global") == expected


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_sampler_is_drawn_by_worker_0_for_all(workers):
    """Samplers differ between workers here, as if nobody had seeded anything."""
    drawn: list = []

    def loader():
        return DataLoader(Numbers(1000), 5, sampler=remembered(Coloured(19), drawn))

    batches = together(workers, loader, batch="global")
    assert [[index for batch in one for index in batch] for one in batches] == drawn[:2]
    assert [[len(batch) for batch in one] for one in batches] == [[5, 5, 5, 4]] * 2


@pytest.mark.parametrize("mode", ["global", "per-worker"])
@pytest.mark.parametrize(("workers", "num_workers"), [(1, 0), (2, 2), (4, 0)])
def test_any_batch_sampler_is_drawn_by_worker_0_for_all(workers, mode, num_workers):
    drawn: list = []

    def loader():
        sampler = remembered(Buckets([4, 7, 2, 9, 1, 6, 3]), drawn)
        return DataLoader(Numbers(40), batch_sampler=sampler, num_workers=num_workers)

    batches = together(workers, loader, batch=mode)
    join = workers if mode == "per-worker" else 1
    expected = [
        [[i for batch in one[at : at + join] for i in batch] for at in range(0, len(one), join)]
        for one in drawn[:2]
    ]
    assert batches == expected


def test_a_batch_of_the_scripts_own_sampler_stays_one_workers():
    """Buckets of samples of like length are not mixed, while there is one for each worker."""
    first, second = job(2)
    sampler = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]
    seen = [
        train(w, w.shard(DataLoader(Numbers(10), batch_sampler=sampler)), 1)[0]
        for w in (first, second)
    ]
    assert [batch for batch, _ in seen[0]] == [[0, 1, 2, 3], [6, 7]]
    assert [batch for batch, _ in seen[1]] == [[4, 5], [8, 9]]
    assert [scale for _, scale in seen[0]] == pytest.approx([8 / 6, 1.0])


def test_indices_may_be_text_or_tuples_and_nothing_else():
    class Sized(Dataset):
        def __getitem__(self, index):
            name, size = index
            return torch.full((size,), ord(name))

    keys = [[("a", 2), ("b", 2)], [("c", 3), ("d", 3)]]
    first, second = job(2)
    for worker, names in ((first, "ac"), (second, "bd")):
        loader = worker.shard(DataLoader(Sized(), batch_sampler=keys), batch="global")
        assert [batch[0, 0].item() for batch in loader] == [ord(name) for name in names]
        worker.backward()
    loader = job(2)[0].shard(DataLoader(Sized(), batch_sampler=[[object(), object()]]))
    with pytest.raises(SpecError, match="indices of type object"):
        next(iter(loader))


def test_nothing_is_left_in_the_store_but_what_those_who_join_need():
    workers = job(3)
    store, keys = workers[0].store, workers[0].store.num_keys()
    for worker in workers:
        for sampler in (Coloured(19), SubsetRandomSampler(range(9))):
            show(worker.shard(DataLoader(Numbers(1000), 5, sampler=sampler)))
    assert store.num_keys() == keys + 2, "what each loader divides"
    for worker in workers:
        show(worker.shard(DataLoader(Numbers(1000), 5, shuffle=True)), passes=3)
    assert store.num_keys() == keys + 3 + 3, "the seed of each pass too"


def test_batch_sampler_and_lists_of_indices_for_the_data_set():
    class Table(Numbers):
        def __getitem__(self, indices):
            return torch.tensor(indices)

    def make():
        sampler = BatchSampler(RandomSampler(Table(23)), 6, False)
        return DataLoader(Table(23), batch_size=None, sampler=sampler)

    torch.manual_seed(1)
    expected = show(make())
    assert together(3, make, batch="global") == expected
    torch.manual_seed(1)
    expected = show(DataLoader(Numbers(23), 12, sampler=RandomSampler(Numbers(23))))
    assert together(2, make) == expected


def test_what_the_script_asks_a_loader():
    def stack(samples):
        return {"index": torch.tensor(samples), "name": [str(sample) for sample in samples]}

    def prepare(number):
        pass

    generator = torch.Generator()
    dataset = Numbers(50)
    plain = DataLoader(
        dataset,
        12,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        collate_fn=stack,
        timeout=30,
        worker_init_fn=prepare,
        multiprocessing_context="fork",
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
    )
    plain.note = "my own"
    worker = job(3)[0]
    loader = worker.shard(plain, batch="global", shares=[2, 1, 1])
    assert isinstance(loader, DataLoader)
    assert loader.dataset is dataset
    assert loader.sampler is plain.sampler
    assert loader.generator is generator
    assert (loader.batch_size, loader.drop_last, len(loader)) == (6, True, 4)
    assert (loader.num_workers, loader.prefetch_factor, loader.timeout) == (2, 3, 30)
    assert (loader.collate_fn, loader.worker_init_fn) == (stack, prepare)
    assert (loader.pin_memory, loader.persistent_workers, loader.note) == (False, True, "my own")
    assert loader.multiprocessing_context.get_start_method() == "fork"
    assert [len(indices) for indices in loader.batch_sampler] == [6] * 4
    assert (loader.batch_sampler.sampler, loader.batch_sampler.drop_last) == (plain.sampler, True)
    assert worker.ledger.num_loaders == 1
    processes = []
    for _ in range(2):
        batches = iter(loader)
        assert len(batches) == 4
        for batch in batches:
            assert [int(name) for name in batch["name"]] == batch["index"].tolist()
        processes.append([p.pid for p in loader._kept[1]._iterator._workers])
    assert processes[0] == processes[1]


def ways_to_iterate(loader):
    """Lists of batches, got in every way that scripts have."""
    torch.manual_seed(4)
    yield list(loader)
    yield [next(iter(loader))]
    yield list(islice(loader, 2))
    yield [batch for _, batch in enumerate(loader)]
    for batch in loader:
        yield [batch]
        break
    outer = iter(loader)
    first = next(outer)
    yield list(loader)  # two at the same time
    yield [first, *outer]
    yield list(outer)
    yield [batch for both in zip(loader, loader, strict=True) for batch in both]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_way_to_iterate(num_workers):
    def make():
        return DataLoader(Numbers(24), 6, shuffle=True, num_workers=num_workers)

    expected = [[b.tolist() for b in batches] for batches in ways_to_iterate(make())]
    for workers in (1, 2):
        parts = [list(ways_to_iterate(w.shard(make(), batch="global"))) for w in job(workers)]
        whole = [
            [[i for part in batch for i in part.tolist()] for batch in zip(*ways, strict=True)]
            for ways in zip(*parts, strict=True)
        ]
        assert whole == expected


def test_passes_in_parallel_over_processes_that_persist_are_refused():
    """Torch itself lets the second take over the processes, and the first loses its place."""
    (worker,) = job(1)
    plain = DataLoader(Numbers(24), 6, num_workers=1, persistent_workers=True)
    loader = worker.shard(plain)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(SpecError, match="persistent_workers"):
        next(first)
    assert len(list(second)) == 4
    iter(loader)
    assert list(second) == []


def test_a_sample_that_cannot_be_read_costs_its_batch_only():
    class Holey(Numbers):
        def __getitem__(self, index):
            if index == 7:
                raise ValueError("a hole")
            return index

    first, second = job(2)
    for worker, expected in ((first, [[0, 1], [9]]), (second, [[3, 4], [8], [10]])):
        loader = worker.shard(
            DataLoader(Holey(11), batch_sampler=[[0, 1, 3, 4], [6, 7, 8], [9, 10]]), batch="global"
        )
        batches, seen = iter(loader), []
        while True:
            try:
                seen.append((next(batches).tolist(), worker.backward()))
            except StopIteration:
                break
            except ValueError:
                continue
        assert [batch for batch, _ in seen] == expected
        assert seen[-1][1] == 1.0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_rest_of_a_pass_is_divided_anew_when_a_worker_is_lost(num_workers):
    """What was read ahead too: a lost worker costs its part of one step, not of several."""
    workers = job(3)
    seen = []
    for worker in workers[:2]:
        loader = worker.shard(DataLoader(Numbers(36), 6, num_workers=num_workers), batch="global")
        batches = iter(loader)
        seen.append([next(batches).tolist()])
        worker.backward()
        worker.participants.members = (0, 1)
        for batch in batches:
            seen[-1].append(batch.tolist())
            assert worker.backward() == 1.0
    whole = [one + two for one, two in zip(*seen, strict=True)]
    assert whole == [[0, 1, 2, 3], *([*range(at, at + 6)] for at in range(6, 36, 6))]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_those_who_divide_a_pass_anew_draw_the_next_as_if_they_had_not(num_workers):
    """A reader of processes draws a seed for them from where passes draw their order."""
    seen = []
    for worker in job(3)[:2]:
        torch.manual_seed(5)
        loader = DataLoader(Numbers(24), 6, shuffle=True, num_workers=num_workers)
        loader, passes = worker.shard(loader, batch="global"), []
        for _ in range(3):
            passes.append([])
            for batch in loader:
                passes[-1].append(batch.tolist())
                worker.backward()
                worker.participants.members = (0, 1)
        seen.append(passes)
    torch.manual_seed(5)
    plain = show(DataLoader(Numbers(24), 6, shuffle=True, num_workers=num_workers), passes=3)
    whole = [[a + b for a, b in zip(*both, strict=True)] for both in zip(*seen, strict=True)]
    assert whole[0][1:] == plain[0][1:], "the third part of the first batch was another's"
    assert whole[1:] == plain[1:]


def test_passes_agree_without_worker_0():
    workers, seen = job(3), []
    for worker in workers:
        torch.manual_seed(worker.rank)
        loader = worker.shard(DataLoader(Numbers(24), 6, shuffle=True), batch="global")
        train(worker, loader, 1)
        if worker.rank:
            worker.participants.members = (1, 2)
            seen.append(train(worker, loader, 1)[0])
    whole = [i for one, two in zip(*seen, strict=True) for i in one[0] + two[0]]
    assert sorted(whole) == list(range(24))


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (lambda: [1, 2], {}, "divides a torch.utils.data.DataLoader"),
        (lambda: DataLoader(Numbers(9)), {"batch": "worker"}, 'write "per-worker" or "global"'),
        (lambda: DataLoader(Numbers(9)), {"shares": [1.0]}, "1 shares for 2 workers"),
        (lambda: DataLoader(Numbers(9)), {"shares": [0.0, 0.0]}, "do not divide"),
        (lambda: DataLoader(Numbers(9)), {"shares": [2.0, -1.0]}, "do not divide"),
        (lambda: DataLoader(Numbers(9), sampler=Coloured(9)), {"seed": 1}, "Coloured draws"),
        (
            lambda: DataLoader(
                Numbers(9), sampler=DistributedSampler(Numbers(9), num_replicas=2, rank=0)
            ),
            {},
            "leave the sampler out",
        ),
        (lambda: job(1)[0].shard(DataLoader(Numbers(9))), {}, "sharded already"),
        (lambda: DataLoader(Numbers(9), 5, drop_last=True), {}, "do not make one global batch"),
    ],
)
def test_what_cannot_be_right_is_refused(make, options, says):
    with pytest.raises(SpecError, match=says):
        job(2)[0].shard(make(), **options)


def test_a_loader_that_iterates_in_its_own_way_is_refused():
    class Repeating(DataLoader):
        def __iter__(self):
            yield from super().__iter__()
            yield from super().__iter__()

    with pytest.raises(SpecError, match="Repeating iterates in a way of its own"):
        job(1)[0].shard(Repeating(Numbers(9)))


def test_workers_with_other_data_are_refused():
    first, second = job(2)
    first.shard(DataLoader(Numbers(9), 2))
    with pytest.raises(SpecError, match="worker 1 divides 8 samples"):
        second.shard(DataLoader(Numbers(8), 2))
    first, second = job(2)
    first.shard(DataLoader(random_split(Numbers(50), [40, 10])[0], 2))
    with pytest.raises(SpecError, match="random_split"):
        second.shard(DataLoader(random_split(Numbers(50), [40, 10])[0], 2))


def test_an_empty_data_set_has_no_batches():
    for worker in job(2):
        assert show(worker.shard(DataLoader(Numbers(0), 4)), 1) == [[]]


def test_small_batches_are_noted():
    workers = job(3)
    workers[0].shard(DataLoader(Numbers(9), 2), batch="global")
    assert workers[0].notes == ["batches of 2 leave some of 3 workers without a sample"]


def test_who_could_join_hears_what_nobody_can_enter():
    plain = DataLoader(list(range(8)), batch_size=2, shuffle=True)
    weighted = DataLoader(list(range(8)), sampler=WeightedRandomSampler([1.0] * 8, 8))
    first, second = job(2)
    loader = first.shard(plain)
    assert not first.join_obstacle.is_final
    assert not first.join_obstacle.batches_are_divided
    next(iter(loader))
    assert first.join_obstacle.batches_are_divided
    first.shard(plain)
    assert first.obstacle == "the job's script shards a second loader"
    (other, _) = job(2)
    other.shard(weighted)
    assert other.obstacle == "the job's script shards a loader with WeightedRandomSampler"
    joined = Identity(index=1, workers=2, founders=1)
    second.participants = Participants(joined)
    with pytest.raises(SpecError, match="cannot go on inside a loader with WeightedRandomSampler"):
        second.shard(weighted)
