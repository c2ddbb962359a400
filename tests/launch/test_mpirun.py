"""MPI moves what its own mpirun started: workers of ours over it are refused before a start."""

import pytest

from paceline import engines, spec
from paceline.errors import SpecError


def asked(kind, workers=2, **fields):
    return spec.Experiment(
        architecture=spec.parse_architecture(kind),
        cluster=spec.Cluster(workers=workers, **fields.pop("cluster", {})),
        **fields,
    )


@pytest.mark.parametrize(
    "experiment",
    [
        asked("ring:backend=mpi"),
        asked("average:backend=mpi,every=4", 3),
        asked("ring:backend=mpi", engine="tunnel"),
        asked("ring:backend=mpi", cluster={"launcher": "ray"}),
    ],
    ids=["ring", "average", "tunnel", "ray"],
)
@pytest.mark.parametrize("dry", [True, False], ids=["dry", "run"])
def test_workers_over_mpi_that_we_would_start_are_refused(tmp_path, experiment, dry):
    told = f"mpirun -n {experiment.cluster.workers} paceline"
    with pytest.raises(SpecError, match=told) as caught:
        engines.check(experiment) if dry else engines.run(experiment, tmp_path / "run")
    assert "MPI knows 1 process, the job has" in caught.value.problem
    assert list(tmp_path.iterdir()) == [], "nothing was written"


@pytest.mark.parametrize(
    "experiment",
    [asked("ring"), asked("ring:backend=gloo"), asked("ring:backend=mpi", workers=1)],
    ids=["auto", "gloo", "one"],
)
def test_what_needs_no_mpirun_is_not_refused(experiment):
    engines.check(experiment)
