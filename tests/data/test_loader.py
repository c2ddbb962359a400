"""Workers together get the global batch, whoever reads it."""

import threading
from contextlib import closing

import pytest
import torch

from paceline import data
from paceline.collectives.group import Group
from paceline.data.base import Dataset
from paceline.data.loader import Loader
from paceline.data.sampling import GlobalBatches, part_of
from paceline.data.scatter import ScatterLoader, describe
from paceline.session.session import Session
from paceline.testing import run_members

SHARES = [3.0, 1.0, 2.0]


class Numbered(Dataset):
    """Sample i is i; remembers the largest number of batches ever made ahead."""

    name, input_shape, num_classes = "numbered", (1,), 1000

    def __init__(self, count: int = 100) -> None:
        self.count = count
        self.made: list[int] = []

    def __len__(self) -> int:
        return self.count

    def batch(self, indices, epoch=0):
        if (indices > 1000).any():
            raise ValueError("no such sample")
        self.made.append(epoch)
        return torch.from_numpy(indices).float()[:, None], torch.from_numpy(indices)


@pytest.mark.parametrize("prefetch", [False, True])
def test_parts_of_all_workers_make_the_global_batch(prefetch):
    dataset, batches = Numbered(), GlobalBatches(100, 17, seed=3)
    loaders = [
        Loader(dataset, batches, part_of(worker, SHARES), prefetch=prefetch) for worker in range(3)
    ]
    streams = [list(loader.steps(4, 9)) for loader in loaders]
    for step, parts in zip(range(4, 9), zip(*streams, strict=True), strict=True):
        together = torch.cat([targets for _, targets in parts])
        assert together.tolist() == batches.indices(step).tolist()


def test_prefetch_stays_one_batch_ahead_and_its_thread_ends():
    dataset = Numbered()
    loader = Loader(dataset, GlobalBatches(100, 10), part_of(0, [1.0]), prefetch=True)
    before = threading.active_count()
    with closing(loader.steps(0, 8)) as steps:
        next(steps)
        next(steps)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert len(dataset.made) <= 3


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_next_batch_follows_a_new_division(prefetch):
    batches, shares = GlobalBatches(100, 12), [1.0, 1.0, 1.0]
    loader = Loader(Numbered(), batches, part_of(0, shares), prefetch=prefetch)
    with closing(loader.steps(0, 4)) as steps:
        assert len(next(steps)[1]) == 4
        shares.pop()
        _, targets = next(steps)
    assert targets.tolist() == batches.indices(1)[:6].tolist()


def test_prefetch_shows_the_error_of_its_thread():
    loader = Loader(Numbered(2000), GlobalBatches(2000, 500), part_of(0, [1.0]), prefetch=True)
    with pytest.raises(ValueError, match="no such sample"):
        list(loader.steps(0, 4))


def test_no_thread_for_a_set_in_memory():
    loader = Loader(Numbered(), GlobalBatches(100, 10), part_of(0, [1.0]))
    before = threading.active_count()
    with closing(loader.steps(0, 3)) as steps:
        next(steps)
        assert threading.active_count() == before


def receive(session: Session, name: str, folder: str) -> None:
    """One worker takes its parts of three steps and saves them. Only worker 0 opens the data."""
    group = Group(session.context(torch.device("cpu"), 0), "gloo")
    dataset = data.open(name, train=False) if session.rank == 0 else None
    description = describe(dataset, group)
    batches = GlobalBatches(description.num_samples, 16, seed=1, shuffle=description.shuffle)
    slices = [part_of(worker, SHARES) for worker in range(3)]
    loader = ScatterLoader(dataset, description, batches, slices, group)
    torch.save(list(loader.steps(2, 5)), f"{folder}/{session.rank}.pt")


@pytest.mark.parametrize("name", ["shapes", "text"])
def test_scattered_parts_are_what_each_would_have_read(name, tmp_path):
    run_members(receive, name, str(tmp_path), workers=3)
    dataset = data.open(name, train=False)
    batches = GlobalBatches(len(dataset), 16, seed=1, shuffle=dataset.shuffle)
    for worker in range(3):
        own = Loader(dataset, batches, part_of(worker, SHARES)).steps(2, 5)
        received = torch.load(tmp_path / f"{worker}.pt")
        for (inputs, targets), (got_inputs, got_targets) in zip(own, received, strict=True):
            assert torch.equal(inputs, got_inputs)
            assert torch.equal(targets, got_targets)
            assert inputs.stride() == got_inputs.stride()
