"""Keras on our exchange, started as peers are: the same samples, and the losses of `single`."""

import pytest

from paceline import engines, spec
from paceline.bench.peers import peer, runner
from paceline.bench.table import loss_difference


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keras-ring", "keras-colocated", "keras-average"])
def test_follows_single_with_uneven_parts(name, tmp_path):
    experiment = spec.Experiment(
        workload=spec.Workload(model="mnist-cnn", data="synthetic", global_batch=8, steps=5),
        cluster=spec.Cluster(workers=3, threads=1),
    )
    run = runner.run(experiment, peer(name), tmp_path / "peer")
    alone = spec.replace(experiment, workers=1, architecture=spec.Single())
    single = engines.run(alone, tmp_path / "single")

    summary = run.summary()
    assert summary.architecture == name
    assert summary.notes[0].startswith("measured with Keras on TensorFlow")
    assert loss_difference(run, single) < 1e-4
    assert {"forward", "backward", "exchange_exposed", "update"} <= set(summary.breakdown_seconds)
