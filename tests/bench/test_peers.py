"""Peers train the same samples from the same weights: their losses are single's.

TensorFlow's need TensorFlow, and skip without it.
"""

import importlib.util
import sys

import pytest

from paceline import engines, spec
from paceline.bench.peers import PEERS, Peer, peer, runner, versions
from paceline.bench.table import loss_difference
from paceline.errors import MissingError, SpecError

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason='TensorFlow is not installed: pip install -e ".[tensorflow]"',
)


def experiment(model="mnist-dnn", workers=2, **changes):
    workload = spec.Workload(
        model=model,
        data="synthetic",
        global_batch=8,
        steps=5,
        optimizer=spec.Optimizer(learning_rate=0.05, momentum=0.5),
    )
    base = spec.Experiment(
        workload=workload,
        cluster=spec.Cluster(workers=workers, threads=1),
        measurement=spec.Measurement(warmup_steps=1),
    )
    return spec.replace(base, **changes)


@pytest.fixture
def single(tmp_path):
    def run(model):
        asked = experiment(model, workers=1, architecture=spec.Single())
        return engines.run(asked, tmp_path / f"single-{model}")

    return run


@pytest.mark.parametrize(
    ("name", "model", "workers"),
    [
        ("ddp", "tutorial-cnn", 2),
        pytest.param(
            "tensorflow-single", "tutorial-cnn", 1, marks=[needs_tensorflow, pytest.mark.slow]
        ),
        pytest.param(
            "tensorflow-single", "cifar10-dnn", 1, marks=[needs_tensorflow, pytest.mark.slow]
        ),
        pytest.param("tensorflow-collective", "mnist-cnn", 2, marks=needs_tensorflow),
    ],
)
def test_a_synchronous_peer_follows_single(name, model, workers, single, tmp_path):
    run = runner.run(experiment(model, workers), peer(name), tmp_path / "peer")

    summary = run.summary()
    assert summary.architecture == name
    assert summary.status == "finished"
    assert loss_difference(run, single(model)) < 1e-3
    assert "not with Paceline" in summary.notes[0]


@needs_tensorflow
@pytest.mark.slow
@pytest.mark.parametrize(("model", "shape"), [("alexnet", (3, 40, 40)), ("resnet50", (3, 32, 32))])
def test_tensorflow_has_the_same_large_networks(model, shape, tmp_path):
    """The first loss depends on every layer and every converted weight."""
    asked = experiment(model, 1, architecture=spec.Single(), input_shape=shape, steps=1)
    asked = spec.replace(asked, global_batch=16)

    theirs = runner.run(asked, peer("tensorflow-single"), tmp_path / "peer").summary()
    ours = engines.run(asked, tmp_path / "ours").summary()

    assert theirs.loss.first == pytest.approx(ours.loss.first, rel=1e-3)


@needs_tensorflow
def test_tensorflows_server_is_started_and_stopped(tmp_path):
    run = runner.run(experiment(), peer("tensorflow-server"), tmp_path / "peer")

    summary = run.summary()
    assert [member.role for member in summary.members] == [
        "worker", "worker", "server", "coordinator"
    ]  # fmt: skip
    assert all(member.status == "finished" for member in summary.members)
    steps = [step for worker in ("worker0", "worker1") for step in run.steps(worker)]
    assert len(steps) == 10
    assert all(step.loss is not None for step in steps)
    assert not summary.breakdown_seconds, "what nobody saw is absent"


def test_a_missing_peer_says_how_to_install_it():
    absent = Peer(
        name="absent",
        title="Absent",
        module="paceline.bench.peers.ddp",
        packages=("no_such_framework",),
        install="pip install no-such-framework",
        like=spec.Ring(),
    )
    with pytest.raises(MissingError, match="pip install no-such-framework"):
        versions(absent, sys.executable)


def test_an_interpreter_that_is_none_is_named():
    with pytest.raises(MissingError, match="--peer-python"):
        versions(PEERS["ddp"], "/nowhere/python")


def test_peers_refuse_to_train_something_else(tmp_path):
    uneven = experiment(shares=(2.0, 1.0))
    with pytest.raises(SpecError, match="uneven shares"):
        runner.run(uneven, peer("ddp"), tmp_path / "peer")
    assert not (tmp_path / "peer").exists()


def test_a_comparison_with_a_peer_ends_in_a_page(tmp_path):
    from paceline import report
    from paceline.bench import compare
    from paceline.bench.compare import ComparisonFolder

    question = spec.Comparison(
        experiment=experiment(workers=1), compare=spec.Axes(peers=("ddp",), repeats=1)
    )
    folder = ComparisonFolder.create(tmp_path / "c", question)
    table = compare.run(folder)

    row = next(row for row in table.rows if row.peer)
    assert row.versions
    assert row.trains_like_single is True
    page = report.write(table, tmp_path / "page", files=False)
    assert "ddp" in page.read_text(encoding="utf-8")
