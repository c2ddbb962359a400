"""The built-in loop: same seed, same result; a break changes nothing; real data are learnt."""

import pytest

from paceline import engines, spec
from paceline.errors import MemberError
from paceline.record import RunFolder, losses


def run(tmp_path, name, **changes) -> RunFolder:
    experiment = spec.replace(spec.Experiment(), **{"architecture": spec.Single(), **changes})
    said = []
    try:
        return engines.run(experiment, tmp_path / name, output=lambda *line: said.append(line))
    except MemberError as error:
        pytest.fail(f"{error}\n{said}")


def curve(folder: RunFolder) -> dict[int, float]:
    return losses({m.name: folder.steps(m.name) for m in folder.members() if m.role == "worker"})


SMALL = {"model": "mnist-dnn", "data": "synthetic", "global_batch": 32, "steps": 20, "seed": 4}


def test_same_seed_same_result_and_another_seed_another(tmp_path):
    first, again = (curve(run(tmp_path, name, **SMALL)) for name in "ab")
    other = curve(run(tmp_path, "c", **{**SMALL, "seed": 5}))
    assert first == again
    assert first != other
    assert len(first) == 20


def test_resuming_gives_the_curve_without_the_break(tmp_path):
    optimizer = {"name": "adam", "learning_rate": 0.01}
    options = {
        **SMALL,
        "model": "tests.support.user_models:with_dropout",
        "data": "shapes",
        "global_batch": 8,
        "steps": 6,
        "optimizer": optimizer,
    }
    whole = curve(run(tmp_path, "whole", **options))
    first = run(tmp_path, "first", **{**options, "checkpoint_every": 3})
    checkpoints = sorted(path.name for path in (first.path / "checkpoints").iterdir())
    saved = ["step-00000003", "step-00000006"]  # the last weights too, and no partial file
    assert checkpoints == [f"{name}.{kind}" for name in saved for kind in ("json", "pt")]
    middle = first.path / "checkpoints" / "step-00000003.json"
    resumed = curve(run(tmp_path, "resumed", **options, resume=str(middle)))
    assert list(resumed) == [3, 4, 5]
    assert resumed == {step: loss for step, loss in whole.items() if step >= 3}


def test_accumulating_gives_the_curve_of_the_whole_batch(tmp_path):
    whole = curve(run(tmp_path, "whole", **SMALL))
    pieces = curve(run(tmp_path, "pieces", **SMALL, accumulate=4))
    assert pieces == pytest.approx(whole, rel=1e-4)


def test_samples_that_fill_no_batch_are_told(tmp_path):
    asked = {**SMALL, "steps": 0, "epochs": 0.02, "global_batch": 60}
    folder = run(tmp_path, "epochs", **asked)
    (note,) = [one.text for one in folder.events() if "fill no batch" in one.text]
    assert " samples fill no batch of 60 and are left out of each epoch" in note


@pytest.mark.slow
def test_worker_0_may_read_for_all(tmp_path):
    ring = {**SMALL, "architecture": spec.Ring(), "workers": 2}
    each = curve(run(tmp_path, "each", **ring))
    scattered = curve(run(tmp_path, "scattered", **ring, reading="scatter"))
    alone = curve(run(tmp_path, "alone", **SMALL))
    assert scattered == pytest.approx(each, rel=1e-6)
    assert scattered == pytest.approx(alone, rel=1e-4)


def test_the_record_of_a_run_has_the_contract(tmp_path):
    folder = run(tmp_path, "ring", **{**SMALL, "architecture": spec.Ring(), "workers": 2})
    summary = folder.summary()
    assert (summary.status, summary.engine, summary.architecture) == ("finished", "here", "ring")
    assert summary.samples_per_second > 0
    steps = [step for member in summary.members for step in folder.steps(member.name)]
    parts = sum(sum(step.breakdown_seconds.values()) for step in steps)
    assert 0.3 < parts / sum(step.seconds for step in steps) <= 1.001, "of the same steps' time"
    assert sum(summary.breakdown_seconds.values()) > 0
    for member in summary.members:
        assert (
            member.bytes_sent > 20 * 4 * 178_110 / 2
        )  # at least the parameters, each step, halved
        assert member.packets_received > 0
        assert member.cpu_fraction > 0
        assert member.max_rss_bytes > 10**7


def test_a_member_that_fails_is_shown_and_leaves_a_readable_record(tmp_path):
    experiment = spec.replace(
        spec.Experiment(),
        model="tests.support.user_models:broken_on_worker_1",
        architecture=spec.Ring(),
        workers=2,
    )
    with pytest.raises(MemberError, match="planted failure") as caught:
        engines.run(experiment, tmp_path / "run")
    assert caught.value.member == "worker1"
    summary = RunFolder(tmp_path / "run").summary()
    assert summary.status == "failed"


@pytest.mark.parametrize(
    ("model", "data", "folder", "epochs", "batch", "rate", "least"),
    [
        pytest.param(
            *("mnist-dnn", "mnist", "mnist", 4.0, 128, 0.005, 0.97), marks=pytest.mark.slow
        ),
        ("adult-dnn", "adult", "a9a", 2.0, 64, 0.002, 0.84),
        # logistic regression reaches 64.5 %
        pytest.param(
            *("higgs-dnn", "higgs", "higgs-subset", 8.0, 256, 0.03, 0.68), marks=pytest.mark.slow
        ),
        pytest.param(
            *("cifar10-cnn", "cifar10", "cifar-10-subset", 2.0, 50, 0.001, 0.35),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_real_data_are_learnt(
    tmp_path, shared_data, model, data, folder, epochs, batch, rate, least
):
    done = run(
        tmp_path,
        "run",
        model=model,
        data=data,
        data_dir=str(shared_data / folder),
        epochs=epochs,
        batch=batch,
        optimizer={"name": "adam", "learning_rate": rate},
        schedule={"name": "cosine"},
        evaluate=True,
        threads=1,
    )
    assert done.summary().accuracy["top1"] >= least
