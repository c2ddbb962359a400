"""Command lines of the members of an experiment. `launch` starts them.

The tunnel makes its own identities (other hosts, other addresses) and uses the same commands.
"""

import os
import secrets
import site
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline import architectures, spec
from paceline.launch import Identity, MemberCommand, invitation, share_cores, to_environment
from paceline.launch.identity import TORCH_VARIABLES
from paceline.launch.ray import Placed
from paceline.record import RunFolder

MEMBER_ARGV = (sys.executable, "-m", "paceline.builtin.member")
SERVER_ARGV = (sys.executable, "-P", "-m", "paceline.builtin.member")
"""A server next to a user's script: nothing in the current folder is taken for one of ours."""


def local_identities(
    experiment: spec.Experiment,
    folder: RunFolder,
    coordinator: socket.socket,
    reserved: socket.socket | None = None,
) -> list[Identity]:
    """All members on this host; worker 0 inherits the listening socket, so no port is guessed.

    `reserved` holds a port for a script that makes groups of its own.
    """
    workers, servers = experiment.cluster.workers, experiment.num_servers
    address, port = coordinator.getsockname()
    master = "{}:{}".format(*reserved.getsockname()) if reserved is not None else ""
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
            local_workers=workers,
            master=master,
            launcher="paceline",
            run=str(folder.path.absolute()),
            key=key,
            goes_on=experiment.cluster.goes_on,
        )
        for index in range(workers + servers)
    ]


def command(
    identity: Identity,
    experiment: spec.Experiment,
    *,
    threads: int,
    cores: tuple[int, ...] = (),
    interface: str = "",
) -> MemberCommand:
    """The command line of one member: the built-in loop, or a worker of the user's script.

    `interface` is where all members can be reached, for groups that a script makes of its own.
    """
    script, serves = experiment.workload.script, identity.role == "server"
    inherited = {n: v for n, v in os.environ.items() if n not in TORCH_VARIABLES}
    environment = {
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        **inherited,
        **to_environment(identity),
        **architectures.to_environment(experiment.architecture),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(_python_path(own=script is None)),
    }
    argv: tuple[str, ...] = MEMBER_ARGV if script is None else SERVER_ARGV
    if script is not None and not serves:
        argv = (sys.executable, *script.line)
    keeps_socket = identity.coordinator_descriptor >= 0
    return MemberCommand(
        name=identity.name,
        argv=argv,
        environment=environment,
        cores=cores,
        descriptors=(identity.coordinator_descriptor,) if keeps_socket else (),
        serves=serves,
    )


def local_commands(
    experiment: spec.Experiment,
    folder: RunFolder,
    coordinator: socket.socket,
    reserved: socket.socket,
) -> list[MemberCommand]:
    """Every member of `experiment` on this machine, each worker with its share of the cores."""
    workers = experiment.cluster.workers
    cores = share_cores(workers)
    each = len(cores[0]) or max(1, len(os.sched_getaffinity(0)) // workers)
    threads = experiment.cluster.threads or each
    identities = local_identities(experiment, folder, coordinator, reserved)
    if len(identities) > 1:
        invitation.invite(folder.path, identities[0])
    return [
        command(
            identity,
            experiment,
            threads=threads if identity.role == "worker" else 1,
            cores=cores[identity.rank] if identity.role == "worker" else (),
            interface="lo",
        )
        for identity in identities
    ]


def replacement_commands(experiment: spec.Experiment, folder: RunFolder) -> Iterator[MemberCommand]:
    """Workers for a job that runs, as many as may be started in the place of lost ones."""
    cluster = experiment.cluster
    kind = experiment.architecture
    if not (kind.takes_newcomers and (kind.is_served or cluster.goes_on)):
        return
    for number in range(cluster.restarts):
        told = invitation.to_environment(invitation.read_invitation(str(folder.path), {}))
        one = Identity(index=0, workers=cluster.workers, run=str(folder.path.absolute()))
        plain = command(one, experiment, threads=cluster.threads or 1)
        environment = {n: v for n, v in plain.environment.items() if n != "PACELINE_MEMBER"}
        name = f"worker{cluster.workers + number}"
        yield msgspec.structs.replace(plain, name=name, environment={**environment, **told})


def ray_commands(
    experiment: spec.Experiment, folder: RunFolder, placed: Placed
) -> list[MemberCommand]:
    """Every member of `experiment` where Ray has placed it."""
    threads = experiment.cluster.threads or placed.cores
    return [
        command(identity, experiment, threads=threads if identity.role == "worker" else 1)
        for identity in placed.identities(experiment.cluster.workers, folder.path.absolute())
    ]


def _python_path(own: bool) -> list[str]:
    """Return the folders in which a member finds modules in addition to its own.

    It must find this Paceline. A built-in workload finds "module:function" names in the current
    folder too; a script finds what it would find without us, which is the folder it lies in.
    """
    root = os.path.realpath(Path(__file__).parents[2])
    given = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    here = [os.getcwd()] if own else []
    installed = (*site.getsitepackages(), site.getusersitepackages(), *given)
    # Among other packages it is found, and would bring them before the standard library.
    ours = [] if root in map(os.path.realpath, installed) else [root]
    return list(dict.fromkeys((*here, *ours, *given)))
