"""Members started by mpirun: OpenMPI, and the launchers of MPICH's family (hydra, Intel MPI).

MPI tells a process its number but not where process 0 can be reached; `rendezvous.meet` finds that
out.
"""

from collections.abc import Mapping

import psutil

from paceline import spec
from paceline.errors import SpecError
from paceline.launch.identity import Identity, from_launcher, integer

HYDRA_PROXIES = ("hydra_pmi_proxy", "pmi_proxy", "hydra_bstrap_pro")


def identify(environ: Mapping[str, str]) -> Identity | None:
    if "OMPI_COMM_WORLD_RANK" in environ:
        rank, size, local_rank, local_size = (
            f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        )
    elif "PMI_RANK" in environ and "MPI_LOCALNRANKS" in environ:
        rank, size, local_rank, local_size = (
            "PMI_RANK",
            "PMI_SIZE",
            "MPI_LOCALRANKID",
            "MPI_LOCALNRANKS",
        )
    else:
        return None
    return from_launcher(
        environ,
        "mpirun",
        index=integer(environ, rank),
        members=integer(environ, size),
        local_index=integer(environ, local_rank),
        local_members=integer(environ, local_size),
        coordinator=_given_coordinator(environ),
        host=environ.get("PMIX_HOSTNAME", environ.get("PMI_HOSTNAME", "")),
    )


def check_backend(experiment: spec.Experiment) -> None:
    """Raise SpecError for workers over MPI that we would start ourselves: each would be alone in
    its own world."""
    if experiment.architecture.collective == "mpi":
        check_world(1, experiment.cluster.workers)


def check_world(size: int, workers: int) -> None:
    """Raise SpecError where MPI knows other processes than this job's workers."""
    if size != workers:
        problem = f"MPI knows {size} process{'es' * (size > 1)}, the job has {workers} workers."
        fix = f"start it with `mpirun -n {workers} paceline …`, without --workers or servers."
        raise SpecError("backend = mpi", problem, fix)


def job_name(environ: Mapping[str, str]) -> str | None:
    """A name that the members of this job on this host share, and no other job has."""
    if "PMIX_NAMESPACE" in environ:
        return environ["PMIX_NAMESPACE"]
    # MPICH's launcher names no job; the proxy that started this host's members stands for it.
    for ancestor in psutil.Process().parents():
        if ancestor.name() in HYDRA_PROXIES:
            return f"hydra-{ancestor.pid}-{ancestor.create_time():.2f}"
    return None


def _given_coordinator(environ: Mapping[str, str]) -> str:
    """`mpirun -x MASTER_ADDR -x MASTER_PORT` is how torch scripts are run under MPI."""
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return ""
