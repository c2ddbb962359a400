"""Checkpoints: exact, whole or not there, checked before use, and never at the cost of the last."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys

import msgspec
import pytest
import torch
from torch.distributed import HashStore

from paceline import spec
from paceline.architectures.average import AverageArchitecture
from paceline.autograd.trained import Trained
from paceline.builtin import checkpoint
from paceline.errors import RecordError, SpecError
from paceline.record import checkpoints
from paceline.testing import run_members
from tests.support.threads import run_threads

MODEL = "tests.support.user_models:with_dropout"


def experiment(workers=1, **changes):
    base = {"model": MODEL, "workers": workers, "steps": 20, "architecture": spec.Single()}
    if workers > 1:
        base["architecture"] = spec.Average(every=4)
    return spec.replace(spec.Experiment(), **{**base, **changes})


class Nothing:
    """An architecture that keeps nothing."""

    def settle(self):
        pass


def made(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def save(run, step, seed=0, **changes):
    model, optimizer = made(seed)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    arguments = {"architecture": Nothing(), "experiment": experiment(**changes), "store": None}
    checkpoint.save(run, step=step, model=model, optimizer=optimizer, **arguments)
    return model.weight.detach().clone()


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_is_saved_is_found_and_torch_reads_it_too(tmp_path):
    weight = save(tmp_path, 10)
    assert names(tmp_path) == ["step-00000010.json", "step-00000010.pt"]
    found = checkpoints.choose(tmp_path)
    model, optimizer = made(seed=1)
    assert checkpoint.load(found, model=model, optimizer=optimizer) == 10
    assert torch.equal(model.weight, weight)
    plain = torch.load(tmp_path / "checkpoints" / "step-00000010.pt", weights_only=True)
    assert torch.equal(plain["model"]["weight"], weight)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit": (flip, "step-00000020.pt is damaged: its checksum"),
    "cut short": (lambda p: os.truncate(p, 100), "step-00000020.pt is damaged: it has 100 bytes"),
    "empty": (lambda p: os.truncate(p, 0), "step-00000020.pt is damaged: it has 0 bytes"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "is damaged: it has"),
    "another file": (lambda p: p.write_text("hello"), "step-00000020.pt is damaged"),
    "gone": (lambda p: p.unlink(), "step-00000020.pt cannot be read: No such file"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "20.pt cannot be read: it is not a plain"),
    "a pipe": (lambda p: (p.unlink(), os.mkfifo(p)), "20.pt cannot be read: it is not a plain"),
    "bad last file": (lambda p: p.with_suffix(".json").write_text("{"), "20.json is damaged"),
    "another last file": (lambda p: p.with_suffix(".json").write_text("[]"), "20.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, damage):
    save(tmp_path, 10)
    save(tmp_path, 20, seed=1)
    do, sentence = DAMAGES[damage]
    do(tmp_path / "checkpoints" / "step-00000020.pt")
    found = checkpoints.choose(tmp_path)
    assert found.manifest.step == 10
    (told,) = found.passed_over
    assert sentence in told
    with pytest.raises(SpecError, match="step-00000020"):
        checkpoints.choose(tmp_path / "checkpoints" / "step-00000020.json")


def test_where_none_is_whole_it_is_said(tmp_path):
    with pytest.raises(SpecError, match="has no whole checkpoint"):
        checkpoints.choose(tmp_path)
    save(tmp_path, 10)
    flip(tmp_path / "checkpoints" / "step-00000010.pt")
    with pytest.raises(SpecError, match=r"step-00000010.pt is damaged(.|\n)*none is left"):
        checkpoints.choose(tmp_path)


def test_a_checkpoint_of_another_model_is_one_sentence(tmp_path):
    save(tmp_path, 10)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SpecError, match="does not fit this model"):
        checkpoint.load(checkpoints.choose(tmp_path), model=model, optimizer=optimizer)


def test_a_pickle_is_not_run(tmp_path):
    save(tmp_path, 10)
    path, ran = tmp_path / "checkpoints" / "step-00000010.pt", tmp_path / "ran"
    torch.save({"model": Evil(ran)}, path)
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest["files"][path.name] = msgspec.to_builtins(checkpoints.describe(path))
    path.with_suffix(".json").write_text(json.dumps(manifest))
    model, optimizer = made()
    with pytest.raises(SpecError, match="cannot be read"):
        checkpoint.load(checkpoints.choose(tmp_path), model=model, optimizer=optimizer)
    assert not ran.exists()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_disk_without_room_leaves_the_last_one_and_no_part(tmp_path):
    save(tmp_path, 10)
    before, limits = names(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(RecordError, match=r"step-00000020.pt cannot be written"):
            save(tmp_path, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == before
    assert checkpoints.choose(tmp_path).manifest.step == 10


def test_a_full_disk_is_called_so(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    assert checkpoint._reason(full, tmp_path) == "the disk is full"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_disk_that_torch_fills_is_called_full(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(tmp_path)]
    subprocess.run(mount, check=True)
    try:
        with pytest.raises(RecordError, match="cannot be written: the disk is full"):
            checkpoint._write(tmp_path, "step-00000010.pt", {"model": torch.zeros(10_000)})
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


KILLER = """
import os, pathlib, random, signal, sys, time
from tests.builtin.test_checkpoint import save
run, chance = pathlib.Path(sys.argv[1]), random.Random(1)
save(run, 1)
for number in range(1, 21):
    child = os.fork()
    if not child:
        for step in range(1000 * number, 1000 * number + 999):
            save(run, step, seed=step)
        os._exit(1)
    time.sleep(chance.uniform(0.005, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_kills_in_the_middle_of_writing_lose_nothing(tmp_path):
    subprocess.run([sys.executable, "-c", KILLER, str(tmp_path)], check=True, timeout=100)
    whole = {name for name in names(tmp_path) if name.endswith(".json")}
    for name in whole:
        checkpoints.choose(tmp_path / "checkpoints" / name)
    (tmp_path / "checkpoints" / ".step-00099999.pt.1").write_bytes(b"half")
    assert checkpoints.sweep(tmp_path) >= 1
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    found = checkpoints.choose(tmp_path)
    assert found.path.name == max(whole)
    assert not found.passed_over


def told(tmp_path, **changes):
    save(tmp_path, 10)
    return list(checkpoints.differences(checkpoints.choose(tmp_path), experiment(**changes)))


def test_going_on_with_something_else_is_said(tmp_path):
    assert told(tmp_path) == []
    (seed,) = told(tmp_path, seed=3)
    assert "seed 0, and this run 3" in seed
    (data,) = told(tmp_path, data="synthetic", global_batch=32)
    assert "trained on shapes, and goes on with synthetic" in data
    (batch,) = told(tmp_path, batch=8)
    assert "32 samples a step, and this run takes 8" in batch
    (workers,) = told(tmp_path, workers=2, global_batch=32, architecture=spec.Ring())
    assert "the same training up to rounding" in workers


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 10}, "has 10 steps behind it, and steps = 10"),
        ({"steps": 3}, "has 10 steps behind it, and steps = 3"),
        ({"model": "mnist-dnn"}, "and this run has mnist-dnn"),
        ({"optimizer": {"name": "adam"}}, "is of optimizer sgd"),
    ],
)
def test_going_on_where_it_makes_no_sense_is_refused(tmp_path, changes, sentence):
    with pytest.raises(SpecError, match=sentence):
        told(tmp_path, **changes)


# Exact: what an architecture keeps between steps is saved, by each worker.

STEPS, BREAK, WORKERS = 14, 6, 3


def train_average(collective, context, run, options, start):
    """Weights at the end, of a run that saves at a step; or of one that goes on from there."""
    rank = context.identity.rank
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    for number, values in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        values.data.copy_(torch.randn(values.shape, generator=generator) / 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = checkpoints.choose(run) if start else None
    if found is not None:
        assert checkpoint.load(found, model=model, optimizer=optimizer) == start
    architecture = AverageArchitecture(options, context, collective)
    architecture.distribute(Trained(model, [optimizer]))
    if found is not None:
        checkpoint.load_own(found, architecture, context.identity.name, own=True)
    for step in range(start, STEPS):
        generator = torch.Generator().manual_seed(100 * rank + step)
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        if step + 1 == BREAK and not start:
            architecture.settle()
            arguments = {"experiment": experiment(WORKERS), "store": STORE, "rank": rank}
            checkpoint.save(
                run,
                step=BREAK,
                model=model,
                optimizer=optimizer,
                architecture=architecture,
                **arguments,
            )
    architecture.settle()
    return [values.detach().clone() for values in model.parameters()]


STORE = HashStore()


@pytest.mark.parametrize(
    "options",
    [
        spec.Average(every=4),
        spec.Average(every=4, outer="nesterov"),
        spec.Average(every=4, overlap=True),
        spec.Average(every=4, overlap=True, outer="nesterov"),
        spec.Average(every=4, state=True),
    ],
    ids=spec.format_architecture,
)
def test_averaging_goes_on_exactly(tmp_path, options):
    for worker in range(1, WORKERS):
        STORE.delete_key(f"checkpoint/step-{BREAK:08d}.worker{worker}")
    whole = run_threads(train_average, WORKERS, tmp_path, options, 0)
    assert len([name for name in names(tmp_path) if name.endswith(".pt")]) == WORKERS
    resumed = run_threads(train_average, WORKERS, tmp_path, options, BREAK)
    for mine, theirs in zip(resumed, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def train_compressed(session, run):
    """The same, through servers that get a part of each gradient; in one job, twice."""
    start = BREAK if (run / "checkpoints").exists() else 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = checkpoints.choose(run) if start else None
    if found is not None:
        checkpoint.load(found, model=model, optimizer=optimizer)
    session.distribute(model, optimizer)
    if found is not None:
        checkpoint.load_own(found, session.architecture, session.identity.name, own=True)
    for step in range(start, STEPS):
        torch.manual_seed(1000 * step + session.rank)
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
        if step + 1 == BREAK:
            session.architecture.settle()
            checkpoint.save(
                run,
                step=BREAK,
                model=model,
                optimizer=optimizer,
                architecture=session.architecture,
                experiment=experiment(2, architecture=session.options),
                store=session.store,
                rank=session.rank,
            )
    session.architecture.settle()
    return [values.detach().numpy().tobytes() for values in model.parameters()]


def test_compression_goes_on_exactly(tmp_path):
    options = spec.Server(transport="tcp", compression="topk", topk_fraction=0.1)
    arguments = {"workers": 2, "servers": 1, "architecture": options}
    whole = run_members(train_compressed, tmp_path, **arguments)
    assert "step-00000006.worker1.pt" in names(tmp_path)
    assert run_members(train_compressed, tmp_path, **arguments) == whole
    shutil.rmtree(tmp_path / "checkpoints")
