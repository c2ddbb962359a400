"""From an experiment to the command lines of its members. Starting them is `launch`'s work.

The tunnel makes its own identities (other hosts, other addresses) and uses the same commands.
"""

import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import architectures, spec
from paceline.launch import Identity, MemberCommand, share_cores, to_environment
from paceline.launch.ray import Placed
from paceline.record import RunFolder

MEMBER_ARGV = (sys.executable, "-m", "paceline.training.member")


def local_identities(
    experiment: spec.Experiment, folder: RunFolder, coordinator: socket.socket
) -> list[Identity]:
    """All members on this host; worker 0 inherits the listening socket, so no port is guessed."""
    workers, servers = experiment.cluster.workers, experiment.num_servers
    address, port = coordinator.getsockname()
    key = secrets.token_hex(32)
    return [
        Identity(
            index=index,
            workers=workers,
            servers=servers,
            host=socket.gethostname(),
            address=address,
            coordinator=f"{address}:{port}",
            coordinator_descriptor=coordinator.fileno() if index == 0 else -1,
            local_index=index,
            local_members=workers + servers,
            launcher="paceline",
            run=str(folder.path.absolute()),
            key=key,
        )
        for index in range(workers + servers)
    ]


def command(
    identity: Identity,
    options: spec.Architecture,
    *,
    threads: int,
    cores: tuple[int, ...] = (),
    script: Sequence[str] = (),
) -> MemberCommand:
    """The command line of one member: the built-in loop, or `script` for a worker of one's own."""
    own = script and identity.role == "worker"
    environment = {
        **os.environ,
        **to_environment(identity),
        **architectures.to_environment(options),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        # Members must find what the launcher finds: this Paceline, and "module:function" names.
        "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), *_package_path()))),
    }
    keeps_socket = identity.coordinator_descriptor >= 0
    return MemberCommand(
        name=identity.name,
        argv=(sys.executable, *script) if own else MEMBER_ARGV,
        environment=environment,
        cores=cores,
        descriptors=(identity.coordinator_descriptor,) if keeps_socket else (),
    )


def local_commands(
    experiment: spec.Experiment,
    folder: RunFolder,
    coordinator: socket.socket,
    script: Sequence[str] = (),
) -> list[MemberCommand]:
    """Every member of `experiment` on this machine, each worker with its share of the cores."""
    workers = experiment.cluster.workers
    cores = share_cores(workers)
    each = len(cores[0]) or max(1, len(os.sched_getaffinity(0)) // workers)
    threads = experiment.cluster.threads or each
    return [
        command(
            identity,
            experiment.architecture,
            threads=threads if identity.role == "worker" else 1,
            cores=cores[identity.rank] if identity.role == "worker" else (),
            script=script,
        )
        for identity in local_identities(experiment, folder, coordinator)
    ]


def ray_commands(
    experiment: spec.Experiment, folder: RunFolder, placed: Placed, script: Sequence[str] = ()
) -> list[MemberCommand]:
    """Every member of `experiment` where Ray has placed it."""
    threads = experiment.cluster.threads or placed.cores
    return [
        command(
            identity,
            experiment.architecture,
            threads=threads if identity.role == "worker" else 1,
            script=script,
        )
        for identity in placed.identities(experiment.cluster.workers, folder.path.absolute())
    ]


def _package_path() -> list[str]:
    root = str(Path(__file__).resolve().parents[2])
    return [root, os.environ.get("PYTHONPATH", "")]
