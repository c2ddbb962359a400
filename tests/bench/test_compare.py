"""Comparisons of tiny runs, real where it matters, made up where only the bookkeeping is tested."""

import msgspec
import pytest

from paceline import engines, spec
from paceline.bench import compare, grid
from paceline.bench.compare import ComparisonFolder
from paceline.bench.table import loss_difference
from paceline.errors import MemberError, SpecError
from paceline.record import MemberRecord, RunFolder, Step, summarise
from tests.support.synthetic import synchronous_run


def asked(**axes):
    workload = spec.Workload(
        model="mnist-dnn",
        data="synthetic",
        batch=8,
        steps=4,
        optimizer=spec.Optimizer(learning_rate=0.1),
    )
    experiment = spec.Experiment(
        name="tiny", workload=workload, measurement=spec.Measurement(warmup_steps=1)
    )
    return spec.Comparison(experiment=experiment, compare=spec.Axes(**axes))


def make_up(experiment, path, *, loss=1.0, output=None):
    """A run folder as an engine leaves it: steps of one second over the number of workers."""
    folder = RunFolder.create(path, experiment)
    workers = experiment.cluster.workers
    for rank in range(workers):
        folder.write_member(
            MemberRecord(name=f"worker{rank}", role="worker", host="h", cpu_fraction=1.0)
        )
        steps = [
            Step(
                step=number,
                start_seconds=number / workers,
                end_seconds=(number + 1) / workers,
                breakdown_seconds={"forward": 0.5 / workers},
                samples=8,
                loss=loss,
            )
            for number in range(4)
        ]
        lines = b"".join(msgspec.json.encode(step) + b"\n" for step in steps)
        (path / "members" / f"worker{rank}.steps.jsonl").write_bytes(lines)
    summarise(folder, "finished")
    return folder


def test_a_real_comparison_trains_like_single_and_says_so(tmp_path):
    question = asked(architectures=("ring",), workers=(2,), repeats=2)
    folder = ComparisonFolder.create(tmp_path / "c", question)

    table = compare.run(folder)

    ring = next(row for row in table.rows if row.architecture == "ring")
    assert ring.failed is None
    assert ring.repeats == 2
    assert ring.trains_like_single is True
    assert ring.speedup is not None
    assert ring.bytes_per_step
    assert "Fastest" in table.verdict


def test_another_optimizer_is_flagged(tmp_path, monkeypatch):
    def engine(experiment, path, **_):
        worker_count = experiment.cluster.workers
        return make_up(experiment, path, loss=1.0 if worker_count == 1 else 1.1)

    monkeypatch.setattr(engines, "run", engine)
    question = asked(architectures=("ring",), workers=(2,), repeats=1)

    table = compare.run(ComparisonFolder.create(tmp_path / "c", question))

    ring = next(row for row in table.rows if row.architecture == "ring")
    assert ring.trains_like_single is False
    assert ring.loss_difference == pytest.approx(0.1)
    assert ring.speedup == pytest.approx(4.0)  # two workers, each twice as fast in the made-up run
    assert "does not train like single" in table.verdict


def test_a_failed_cell_is_a_row_with_its_reason_and_the_rest_goes_on(tmp_path, monkeypatch):
    def engine(experiment, path, **_):
        if experiment.cluster.workers == 2:
            raise MemberError("worker1", 1, ["out of luck"])
        return make_up(experiment, path)

    monkeypatch.setattr(engines, "run", engine)
    question = asked(architectures=("ring",), workers=(1, 2, 4), repeats=2)

    table = compare.run(ComparisonFolder.create(tmp_path / "c", question))

    by_workers = {row.workers: row for row in table.rows if row.architecture == "ring"}
    assert "out of luck" in by_workers[2].failed
    assert by_workers[4].failed is None
    assert by_workers[4].repeats == 2


def test_a_cell_that_cannot_be_is_a_row_with_its_reason_and_the_rest_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "run", lambda experiment, path, **_: make_up(experiment, path))
    question = asked(architectures=("pipeline",), workers=(1, 2), repeats=1)

    table = compare.run(ComparisonFolder.create(tmp_path / "c", question))

    by_workers = {row.workers: row for row in table.rows if row.architecture == "pipeline"}
    assert "two stages or more" in by_workers[1].failed
    assert by_workers[2].failed is None
    with pytest.raises(SpecError, match="two stages or more"):
        grid.cells(asked(architectures=("pipeline",), workers=(1,)))


def test_a_broken_comparison_goes_on_where_it_stopped(tmp_path, monkeypatch):
    ran = []

    def engine(experiment, path, **_):
        if len(ran) == 2:
            (path / "members").mkdir(parents=True)  # half a run, as ctrl-C leaves it
            raise KeyboardInterrupt
        ran.append(experiment.name)
        return make_up(experiment, path)

    monkeypatch.setattr(engines, "run", engine)
    question = asked(architectures=("ring",), workers=(2, 4), repeats=1)
    folder = ComparisonFolder.create(tmp_path / "c", question)
    with pytest.raises(KeyboardInterrupt):
        compare.run(folder)
    assert len(ran) == 2

    ran.append("the break")
    table = compare.run(ComparisonFolder.open(tmp_path / "c"))

    ran.remove("the break")
    assert len(ran) == len(set(ran)), "nothing was run twice"
    assert all(row.failed is None for row in table.rows)


def test_the_question_is_kept_and_read_back(tmp_path):
    question = asked(architectures=("ring", "server:mode=async"), workers=(1, 2))
    folder = ComparisonFolder.create(tmp_path / "c", question)

    assert folder.comparison() == question
    with pytest.raises(SpecError, match="--resume"):
        ComparisonFolder.create(tmp_path / "c", question)


def test_rounding_that_grew_is_told_from_another_training(tmp_path):
    """Losses of one training apart by rounding that a hundred steps made large, and of another."""
    usual = {"workers": 1, "architecture": "single", "steps": 100}

    def curve(step):
        return 2.3 / (1 + 0.05 * step)

    single = synchronous_run(tmp_path / "single", losses=curve, **usual)
    rounded = synchronous_run(
        tmp_path / "rounded",
        losses=lambda s: curve(s) * (1 + (-1) ** s * min(0.05, 5e-8 * 1.25**s)),
        **usual,
    )
    assert loss_difference(rounded, single) < 1e-3
    late = synchronous_run(tmp_path / "late", losses=lambda s: curve(s) if s < 60 else 2.3, **usual)
    assert loss_difference(late, single) > 0.1
    other = synchronous_run(tmp_path / "other", losses=lambda s: 1.01 * curve(s), **usual)
    assert loss_difference(other, single) == pytest.approx(0.01, rel=0.01)
