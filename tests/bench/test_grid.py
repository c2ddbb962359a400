import pytest

from paceline import spec
from paceline.bench import grid
from paceline.errors import SpecError


def comparison(**axes):
    workload = spec.Workload(model="mnist-dnn", data="synthetic", steps=4)
    return spec.Comparison(experiment=spec.Experiment(workload=workload), compare=spec.Axes(**axes))


def rows(found):
    return [cell for cell in found if not cell.reference]


def test_single_is_the_baseline_once_and_servers_vary_only_where_there_are_any():
    asked = comparison(architectures=("single", "ring", "server"), workers=(1, 2), servers=(1, 2))
    found = [(c.architecture, c.experiment.cluster.workers) for c in rows(grid.cells(asked))]

    assert found.count(("single", 1)) == 1
    assert found.count(("ring", 2)) == 1
    assert found.count(("server", 2)) == 2


def test_every_cell_has_single_on_its_global_batch_to_be_laid_over():
    found = grid.cells(comparison(architectures=("ring",), workers=(1, 2), batches=(8,)))
    by_key = {cell.key: cell for cell in found}

    for cell in rows(found):
        reference = by_key[grid.single_like(cell).key]
        assert reference.global_batch == cell.global_batch
        assert reference.experiment.architecture == spec.Single()


def test_strong_scaling_keeps_the_global_batch():
    found = rows(
        grid.cells(comparison(architectures=("ring",), workers=(2, 4), global_batches=(64,)))
    )

    assert {cell.global_batch for cell in found} == {64}
    baselines = {grid.baseline_like(cell).key for cell in found}
    assert baselines == {found[0].key}


def test_every_worker_of_a_grid_has_the_same_threads():
    found = grid.cells(comparison(architectures=("ring",), workers=(1, 2)))

    assert len({cell.experiment.cluster.threads for cell in found}) == 1


def test_repeats_are_interleaved_and_references_run_once():
    found = grid.cells(comparison(architectures=("ring",), workers=(2,)))
    order = [(repeat, cell.key) for repeat, cell in grid.schedule(found, 2)]

    assert [repeat for repeat, _ in order] == sorted(repeat for repeat, _ in order)
    once = [cell.key for cell in found if cell.reference]
    assert once
    assert all(sum(key == known for _, key in order) == 1 for known in once)


def test_a_prediction_is_made_once():
    predicted = spec.vary(
        comparison(architectures=("ring",), workers=(2,)), {"engine": "predict"}, {}
    )
    found = grid.cells(predicted)

    assert {repeat for repeat, _ in grid.schedule(found, 3)} == {0}


def test_more_grids_join_the_first():
    asked = spec.Comparison(
        experiment=spec.Experiment(),
        compare=spec.Axes(architectures=("ring",), workers=(2,)),
        more=({"workers": [4], "engines": ["tunnel"], "links": ["1gbit"], "steps": 7},),
    )
    found = {cell.experiment.engine: cell.experiment for cell in grid.cells(asked)}

    assert found["tunnel"].cluster.link == "1gbit"
    assert found["tunnel"].workload.steps == 7


def test_peers_run_on_the_workers_they_can():
    asked = comparison(peers=("ddp", "tensorflow-single"), workers=(1, 2))
    found = [(c.peer, c.experiment.cluster.workers) for c in grid.cells(asked) if c.peer]

    assert found == [("ddp", 1), ("ddp", 2), ("tensorflow-single", 1)]


@pytest.mark.parametrize(
    ("axes", "hint"),
    [
        ({"peers": ("dpp",)}, 'did you mean "ddp"'),
        ({"architectures": ("rnig",)}, 'did you mean "ring"'),
        ({"batches": (8,), "global_batches": (8,)}, "keep one"),
        ({"repeats": 0}, "3 or more"),
    ],
)
def test_a_mistake_gets_its_fix(axes, hint):
    with pytest.raises(SpecError, match=hint):
        grid.cells(comparison(**axes))
