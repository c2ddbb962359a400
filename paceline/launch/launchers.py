"""The table of launchers whose environments we read, and the one question asked of it."""

from collections.abc import Callable, Mapping

from paceline.launch import invitation, kubernetes, mpirun, slurm, torchrun
from paceline.launch.identity import Identity, from_paceline

LAUNCHERS: dict[str, Callable[[Mapping[str, str]], Identity | None]] = {
    "paceline": from_paceline,
    "join": invitation.identify,
    "torchrun": torchrun.identify,
    "mpirun": mpirun.identify,
    "kubernetes": kubernetes.identify,
    "srun": slurm.identify,
}
"""The launchers in the order they are asked: our own variables first, Slurm's last, because every
process inside a Slurm job carries them."""


def identify(environ: Mapping[str, str], servers: int | None = None) -> Identity:
    """The identity that `environ` describes; a process without a launcher is one worker alone.

    Foreign launchers start members that are all alike: the last `servers` of them are servers.
    """
    if servers is not None:
        environ = {**environ, "PACELINE_SERVERS": str(servers)}
    for read in LAUNCHERS.values():
        identity = read(environ)
        if identity is not None:
            return identity
    return Identity(run=environ.get("PACELINE_RUN", ""))
