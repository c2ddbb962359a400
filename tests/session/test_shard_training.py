"""Jobs that train on partial batches end with the weights of the plain script."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline import spec
from paceline.record import RunFolder
from paceline.session.calls import no_sync
from paceline.session.loader.sharding import shard
from paceline.testing import run_members

ARCHITECTURES = {"ring": spec.Ring(), "server": spec.Server(placement="colocated")}
SAMPLES, EPOCHS = 37, 3


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return inputs, (inputs @ torch.randn(6, 3, generator=generator)).argmax(1)


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*samples(), strict=True)


class ReadyMade(Dataset):
    """Batches as the data set makes them."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index):
        return tuple(value[16 * index : 16 * (index + 1)] for value in samples())


class Mixed:
    """A batch sampler with random numbers of every kind, unseeded."""

    def __iter__(self):
        order = np.random.permutation(SAMPLES).tolist()
        while order:
            yield [order.pop() for _ in range(min(len(order), random.randrange(1, 9)))]


LOADERS = {
    "in order": lambda: DataLoader(TensorDataset(*samples()), 16),
    "shuffled": lambda: DataLoader(TensorDataset(*samples()), 16, shuffle=True),
    "small": lambda: DataLoader(TensorDataset(*samples()), 3, shuffle=True),
    "weighted": lambda: DataLoader(
        TensorDataset(*samples()), 16, sampler=WeightedRandomSampler(torch.ones(SAMPLES), 41)
    ),
    "stream": lambda: DataLoader(Stream(), 16),
    "ready-made": lambda: DataLoader(ReadyMade(), batch_size=None, shuffle=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader, test) -> None:
    for _ in range(EPOCHS):
        for step, (inputs, targets) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            if step == 1:  # in the middle of a step, and with a partial batch of its own
                count_right(model, test)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def count_right(model: nn.Module, loader) -> int:
    with torch.no_grad():
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)


def held_out() -> DataLoader:
    return DataLoader(TensorDataset(*samples()), 7)


def flat(model: nn.Module) -> list[float]:
    return [value for p in model.state_dict().values() for value in p.flatten().tolist()]


def plain_script(name: str) -> tuple[list[float], int]:
    """Weights, and how many test samples they get right; without any of our lines."""
    model, optimizer = small_model()
    train(model, optimizer, LOADERS[name](), held_out())
    return flat(model), count_right(model, held_out())


def our_script(session, name: str, shares: list[float] | None) -> tuple[list[float], int]:
    """The same with them, on one worker of several."""
    model, optimizer = small_model()
    model, optimizer = session.distribute(model, optimizer)
    test = shard(held_out(), batch="global")
    train(model, optimizer, shard(LOADERS[name](), batch="global", shares=shares), test)
    session.architecture.settle()
    return flat(model), count_right(model, test)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", LOADERS)
def test_two_workers_end_with_the_plain_scripts_weights(name, architecture):
    options = ARCHITECTURES[architecture]
    check(name, run_members(our_script, name, None, workers=2, architecture=options))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "shares"), [("small", None), ("shuffled", [3, 1, 0, 2]), ("stream", None)]
)
def test_four_workers_end_with_the_plain_scripts_weights(name, shares, architecture):
    """With parts that are empty: batches of 3, a worker with a share of 0."""
    options = ARCHITECTURES[architecture]
    check(name, run_members(our_script, name, shares, workers=4, architecture=options))


def check(name: str, results: list[tuple[list[float], int]]) -> None:
    expected, right = plain_script(name)
    for weights, _ in results:
        assert weights == pytest.approx(expected, abs=1e-6)
    assert sum(own for _, own in results) == right


@pytest.mark.parametrize("name", LOADERS)
def test_one_worker_is_the_plain_script(name):
    assert run_members(our_script, name, None, workers=1) == [plain_script(name)]


def test_a_stand_in_is_no_sample_in_the_record(tmp_path):
    folder = RunFolder.create(tmp_path / "run", spec.Experiment(cluster=spec.Cluster(workers=4)))
    run_members(our_script, "small", None, workers=4, folder=folder)
    steps = [folder.steps(f"worker{rank}") for rank in range(4)]
    assert sum(step.samples for own in steps for step in own) == SAMPLES * EPOCHS
    assert [step.samples for step in steps[3]] == [0] * (13 * EPOCHS)


def with_what_is_no_number(session) -> list[float]:
    """A stand-in alone may give what the whole batch does not: the deviation of one sample."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.distribute(model, optimizer)
    before = flat(model)
    session.gradients.scale_by(2.0 if session.rank == 0 else 0.0)
    output = model(torch.ones(3 if session.rank == 0 else 1, 2))
    (output.mean() if session.rank == 0 else output.std()).backward()
    optimizer.step()
    session.architecture.settle()
    return [old - new for old, new in zip(before, flat(model), strict=True)]


def test_a_stand_in_counts_nothing_whatever_comes_of_it():
    results = run_members(with_what_is_no_number, workers=2)
    assert results[0] == pytest.approx([0.5, 0.5, 0.5])


def unseeded(session) -> list[tuple[list[Any], float]]:
    """Each worker's batches from a sampler whose random numbers nobody seeded."""
    model, optimizer = small_model()
    model, optimizer = session.distribute(model, optimizer)
    inputs, targets = samples()
    loader = DataLoader(
        TensorDataset(inputs, targets, torch.arange(SAMPLES)), batch_sampler=Mixed()
    )
    seen = []
    for x, y, indices in shard(loader, batch="global"):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        seen.append((indices.tolist(), session.gradients.scale))
        optimizer.step()
    session.architecture.settle()
    seen.append((flat(model), -1))
    return seen


def test_unseeded_samplers_of_the_script_are_followed():
    results = run_members(unseeded, workers=3)
    weights = [seen.pop()[0] for seen in results]
    whole = [
        [index for part, scale in step if scale for index in part]
        for step in zip(*results, strict=True)
    ]
    assert sorted(index for batch in whole for index in batch) == list(range(SAMPLES))
    model, optimizer = small_model()
    inputs, targets = samples()
    for batch in whole:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    for worker in weights:
        assert worker == pytest.approx(flat(model), abs=1e-6)


def accumulated(session, every: int) -> list[float]:
    model, optimizer = small_model()
    model, optimizer = session.distribute(model, optimizer)
    loader = shard(DataLoader(TensorDataset(*samples()), 8, shuffle=True), batch="global")
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(loader, 1):
            if number % every and number < len(loader):
                with no_sync():
                    (nn.functional.cross_entropy(model(inputs), targets) / every).backward()
                continue
            (nn.functional.cross_entropy(model(inputs), targets) / every).backward()
            optimizer.step()
            optimizer.zero_grad()
    session.architecture.settle()
    return flat(model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_accumulated_batches_count_each_by_itself(architecture):
    """Batches of 8, 8, 8, 8 and 5 by two: uneven ones alone, and in one step with even ones."""
    options = ARCHITECTURES[architecture]
    (alone,) = run_members(accumulated, 2, workers=1)
    for weights in run_members(accumulated, 2, workers=3, architecture=options):
        assert weights == pytest.approx(alone, abs=1e-6)


SCRIPT = """
import json, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
{ours}import paceline; session = paceline.init()
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(37, 5)
train = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(train, 8, shuffle=True, num_workers=2, persistent_workers=True)
test = DataLoader(train, 7, num_workers=1)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
{ours}model, optimizer = paceline.distribute(model, optimizer)
{ours}loader = paceline.shard(loader, batch="global")
{ours}test = paceline.shard(test, batch="global")
for epoch in range(2):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
with torch.no_grad():
    seen = sum(len(x) for x, y in test)
weights = torch.cat([value.flatten() for value in model.state_dict().values()]).tolist()
rank = 0
{ours}rank = session.rank
json.dump([weights, seen], open(f"{{sys.argv[1]}}-{{rank}}.json", "w"))
"""


def test_a_script_whose_loaders_have_processes(in_empty_folder):
    """Members started by `run` may have children; those of `run_members` may not."""
    Path("plain.py").write_text(SCRIPT.format(ours="# "), encoding="utf-8")
    Path("ours.py").write_text(SCRIPT.format(ours=""), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    run = [sys.executable, "-m", "paceline", "run", "-n", "3", "--architecture", "ring"]
    for command in ([sys.executable, "plain.py", "plain"], [*run, "ours.py", "ours"]):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, done.stderr
    weights, seen = json.loads(Path("plain-0.json").read_text(encoding="utf-8"))
    parts = [json.loads(Path(f"ours-{rank}.json").read_text(encoding="utf-8")) for rank in range(3)]
    assert sum(own for _, own in parts) == seen
    for own, _ in parts:
        assert own == pytest.approx(weights, abs=1e-6)
