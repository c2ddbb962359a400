"""Everything that one GPU can show: the same curve as a CPU's, by every way there is."""

import time
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from paceline import data, record, spec
from paceline.builtin import loop
from paceline.compute.graphs import RecordedPasses
from paceline.data.sampling import GlobalBatches, part_of
from paceline.launch import identify
from paceline.record import RunFolder, Summary
from paceline.session.observers.nonfinite import NonfiniteValues
from paceline.session.session import Session
from paceline.testing import run_members

SMALL = {"model": "tutorial-cnn", "data": "shapes", "global_batch": 32, "steps": 20, "seed": 4}


def train_recorded(session: Session) -> None:
    folder = RunFolder(Path(session.identity.run))
    loop.train(folder.experiment(), session, folder)


def train_on_the_cpu(session: Session) -> None:
    torch.cuda.is_available = lambda: False
    train_recorded(session)


def run(
    folder: Path, work=train_recorded, text="single", workers=1, servers=0, **changes
) -> Summary:
    """Train and record; one worker in this process, which has its GPU already."""
    architecture = spec.parse_architecture(text)
    members = {"workers": workers, "servers": servers}
    experiment = spec.replace(
        spec.Experiment(), architecture=architecture, **members, **{**SMALL, **changes}
    )
    made = RunFolder.create(folder / f"{time.monotonic_ns()}", experiment)
    if workers == 1 and not servers and work is train_recorded and "compile" not in changes:
        identity = msgspec.structs.replace(identify({}), run=str(made.path))
        session = Session(
            identity, options=architecture, folder=made, measurement=spec.Measurement()
        )
        try:
            work(session)
        finally:
            session.close()
    else:
        run_members(work, **members, architecture=architecture, folder=made)
    return record.summarise(made, "finished")


def curve(summary_of: Path) -> dict[int, float]:
    folder = RunFolder(summary_of)
    workers = [member.name for member in folder.members() if member.role == "worker"]
    return record.losses({name: folder.steps(name) for name in workers})


def newest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: int(path.name))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("alone")
    run(folder)
    return curve(newest(folder))


def test_the_gpu_follows_the_cpu(tmp_path, alone):
    run(tmp_path, train_on_the_cpu)
    assert curve(newest(tmp_path)) == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"graph": "off"},
        {"graph": "on"},
        {"accumulate": 2},
        {"layout": "channels-first"},
        {"compile": True, "steps": 6},
    ],
    ids=str,
)
def test_an_option_that_is_for_speed_changes_no_result(tmp_path, alone, changes):
    summary = run(tmp_path, **changes)
    found = curve(newest(tmp_path))
    assert found == pytest.approx({step: alone[step] for step in found}, rel=1e-3)
    parts = sum(summary.breakdown_seconds.values())
    assert 0 < parts <= 1.05 * summary.step_seconds.p95 * 3


@pytest.mark.parametrize("text", ["single", "server:placement=colocated"])
def test_passes_of_built_in_models_are_replayed(tmp_path, monkeypatch, text):
    replayed, seen, steps = [], [], SMALL["steps"]
    run_plain, take_plain = RecordedPasses.run, NonfiniteValues.take

    def counted(passes, *given, **named):
        replayed.append(1)
        return run_plain(passes, *given, **named)

    def taken(numbers):
        seen.append(take_plain(numbers))
        return seen[-1]

    monkeypatch.setattr(RecordedPasses, "run", counted)
    monkeypatch.setattr(NonfiniteValues, "take", taken)
    summary = run(tmp_path, text=text)
    assert len(replayed) >= steps - 2  # servers have the weights after a step or two
    assert len(seen) == steps
    assert None not in seen  # whose numbers go wrong is noticed all the same
    notes = summary.notes if isinstance(summary.notes, list) else []
    assert not any("not recorded" in note for note in notes)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_lower_precision_learns_alike(tmp_path, alone, precision):
    run(tmp_path, precision=precision)
    assert curve(newest(tmp_path)) == pytest.approx(alone, rel=0.1)


def test_batch_norm_statistics_are_those_of_a_pass_that_was_not_recorded(tmp_path):
    changes = {
        "model": "resnet50",
        "data": "synthetic",
        "input_shape": (3, 32, 32),
        "steps": 4,
        "checkpoint_every": 3,
        "optimizer": {"name": "sgd", "learning_rate": 1e-5},
    }
    for graph in ("off", "on"):
        run(tmp_path, **changes, graph=graph)
    states = [
        torch.load(path / "checkpoints" / "step-00000003.pt", weights_only=True)["model"]
        for path in sorted(tmp_path.iterdir())
    ]
    plain, recorded = states
    for name, value in plain.items():
        if "tracked" in name:
            assert int(recorded[name]) == int(value) == 3
        if "running" in name:  # what recording adds to them would be half of them
            assert (recorded[name] - value).norm() < 0.02 * value.norm()


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("replicated:devices=2", 1),
        ("replicated:devices=3,shares=3/1/2", 1),
        ("ring", 2),
        ("average", 2),
        ("pipeline", 2),
        ("server:placement=colocated", 2),
        ("server:placement=colocated,transport=tcp", 2),
        ("server:update=worker,placement=colocated", 2),
        ("hybrid", 2),
    ],
)
def test_several_on_one_gpu_follow_one(tmp_path, alone, text, workers):
    summary = run(tmp_path, text=text, workers=workers)
    assert curve(newest(tmp_path)) == pytest.approx(alone, rel=1e-4)
    assert any("share" in note or "replicas" in note for note in summary.notes)


@pytest.mark.parametrize(
    ("text", "workers", "servers"),
    [
        ("server", 1, 1),
        ("server:transport=tcp", 1, 2),
        ("server:chunk=64KiB", 2, 1),
        ("server:placement=colocated", 1, 0),
        ("server:mode=bounded,staleness=0,placement=colocated", 1, 0),
        ("server:mode=quorum,quorum=2", 2, 1),
        ("server:mode=async,placement=colocated", 1, 0),
    ],
)
def test_servers_on_the_cpu_follow_one(tmp_path, alone, text, workers, servers):
    summary = run(tmp_path, text=text, workers=workers, servers=servers)
    assert curve(newest(tmp_path)) == pytest.approx(alone, rel=1e-4)
    assert all(seconds >= 0 for seconds in summary.breakdown_seconds.values())


def train_on_hosts(session: Session, hosts: str) -> None:
    """Worker i is on host `hosts[i]`."""
    session.identity = msgspec.structs.replace(session.identity, host=hosts[session.rank])
    train_recorded(session)
    assert session.architecture is not None
    assert session.architecture.counters()["hosts"] == len(set(hosts))


@pytest.mark.parametrize(
    ("hosts", "text", "servers"),
    [("ab", "hybrid", 0), ("aabb", "hybrid", 0), ("aab", "hybrid:between=server", 1)],
)
def test_hosts_of_workers_on_the_gpu_follow_one(tmp_path, alone, hosts, text, servers):
    work = partial(train_on_hosts, hosts=hosts)
    run(tmp_path, work, text=text, workers=len(hosts), servers=servers)
    assert curve(newest(tmp_path)) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("adam", 1e-3), ("adagrad", 1e-4), ("rmsprop", 1e-5)]
)
def test_optimizers_of_workers_on_the_gpu_run_on_servers(tmp_path, optimizer, rate):
    # A first step of rmsprop is ten times the rate whatever the gradient: larger ones only differ.
    changes = {"optimizer": {"name": optimizer, "learning_rate": rate}, "clip_norm": 0.05}
    folders = [tmp_path / "alone", tmp_path / "served"]
    server = "server:placement=colocated"
    for folder, text in zip(folders, ("single", server), strict=True):
        run(folder, text=text, **changes)
    alone, served = (curve(newest(folder)) for folder in folders)
    assert served == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("text", ["mode=async", "mode=bounded", "mode=quorum"])
def test_workers_of_their_own_pace_learn(tmp_path, text):
    adam = {"optimizer": {"name": "adam", "learning_rate": 1e-3}, "steps": 300}
    run(tmp_path, text=f"server:{text}", workers=2, servers=1, **adam)
    losses = [*curve(newest(tmp_path)).values()]
    assert sum(losses[-20:]) < 0.95 * sum(losses[:20])


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_norm": 0.05},
        {"accumulate": 2},
        {"compile": True, "steps": 6},
        {"optimizer": {"name": "adam", "learning_rate": 1e-3}},
    ],
    ids=str,
)
def test_servers_train_alike_with_every_option(tmp_path, changes):
    folders = [tmp_path / "alone", tmp_path / "served"]
    for folder, text in zip(folders, ("single", "server:placement=colocated"), strict=True):
        run(folder, text=text, **changes)
    alone, served = (curve(newest(folder)) for folder in folders)
    assert served == pytest.approx(alone, rel=1e-3)


def test_a_checkpoint_taken_from_servers_resumes(tmp_path):
    server = "server:placement=colocated"
    adam = {"optimizer": {"name": "adam", "learning_rate": 1e-3}, "steps": 12}
    run(tmp_path / "whole", text=server, **adam, checkpoint_every=5)
    whole = newest(tmp_path / "whole")
    saved = str(whole / "checkpoints" / "step-00000010.pt")
    run(tmp_path / "again", text=server, **adam, resume=saved)
    again = curve(newest(tmp_path / "again"))
    assert min(again) == 10
    assert again == pytest.approx({step: curve(whole)[step] for step in again}, rel=1e-4)


def pictures(folder: Path) -> Path:
    from PIL import Image

    generator = torch.Generator().manual_seed(1)
    for label in ("cat", "dog"):
        (folder / "train" / label).mkdir(parents=True)
        for number in range(12):
            values = torch.randint(256, (60, 80, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(values.numpy()).save(folder / "train" / label / f"{number}.jpeg")
    return folder


@pytest.mark.parametrize("cache", [False, True])
def test_batches_that_were_fed_are_those_of_the_host(tmp_path, cache):
    folder = pictures(tmp_path)
    batches = GlobalBatches(24, 8, seed=3)
    device = torch.device("cuda", 0)

    def opened() -> data.Dataset:
        shape = (3, 32, 32)
        return data.open("imagefolder", data_dir=folder, input_shape=shape, cache=cache)

    with closing(opened()) as here, closing(opened()) as there:
        fed = data.DeviceLoader(here, batches, part_of(0, [1.0]), device).steps(0, 7)
        plain = data.Loader(there, batches, part_of(0, [1.0])).steps(0, 7)
        for (inputs, targets), (expected, classes) in zip(fed, plain, strict=True):
            assert inputs.device == device
            assert torch.allclose(inputs.cpu(), expected, atol=1e-6)
            assert torch.equal(targets.cpu(), classes)
