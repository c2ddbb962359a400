"""Find the coordinator and the job's key where the launcher tells none: member 0 does.

On one host it tells through a socket that only this user's processes are answered on and that
leaves no file behind; between hosts MPI itself carries the news. Nothing is guessed.
"""

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.errors import DeadlineError, ExchangeError, SpecError
from paceline.launch import mpirun
from paceline.launch.identity import Identity, member_name

POLL_SECONDS = 0.02
VISIT_SECONDS = 5.0
JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")

BY_HAND = (
    "make one with `openssl rand -hex 32`, and `export PACELINE_KEY=…` on every host "
    "before the command; it must not be an argument, which everybody can list."
)
HOW_TO_GIVE_A_KEY = {
    "srun": "submit the script that `paceline slurm` writes, or put "
    "`export PACELINE_KEY=$(openssl rand -hex 32)` into yours before srun, which passes it on.",
    "kubernetes": "apply what `paceline kubernetes` writes: it has a Secret for PACELINE_KEY.",
    "mpirun": "`export PACELINE_KEY=$(openssl rand -hex 32)`, then `mpirun -x PACELINE_KEY …`.",
}


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that member 0 sends the others."""

    coordinator: str
    key: str


def meet(
    identity: Identity, environ: Mapping[str, str], deadline_seconds: float = 120.0
) -> Identity:
    """`identity` with its coordinator and the job's key known. Every member calls it, once, before
    the store opens.

    Returns at once where the launcher has told both already. Between hosts a key never travels in
    the open: MPI carries it, or the user gives it, or the job does not start.
    """
    if identity.members == 1 or (identity.coordinator and identity.key):
        return identity
    job = _job_name(identity, environ) if identity.on_one_host else None
    if job is None and identity.launcher != "mpirun":
        raise _no_key(identity)
    # On one host worker 0 opens a port of its own, even where a launcher has named one.
    named = identity.coordinator if job is None else ""
    listener = _listen(identity.address) if identity.index == 0 and not named else None
    notice = None
    if identity.index == 0:
        coordinator = named
        if listener is not None:
            coordinator = f"{identity.address}:{listener.getsockname()[1]}"
        notice = Notice(coordinator=coordinator, key=identity.key or secrets.token_hex(32))
    if job is not None:
        told = _tell_on_host(identity, job, notice, deadline_seconds)
    else:
        told = _tell_by_mpi(notice)
    return msgspec.structs.replace(
        identity,
        coordinator=told.coordinator,
        key=told.key,
        coordinator_descriptor=-1 if listener is None else listener.detach(),
        store_is_kept=False,
    )


def _job_name(identity: Identity, environ: Mapping[str, str]) -> str | None:
    """A name that the members of this job on this host share, and no other job has."""
    if identity.launcher == "mpirun":
        return mpirun.job_name(environ)
    told = [identity.launcher, identity.coordinator, str(identity.attempt)]
    told += [environ.get(name, "") for name in JOB_VARIABLES]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]


def _no_key(identity: Identity) -> SpecError:
    problem = f"the {identity.members} members run on several hosts, and no key was given: "
    problem += "anybody who reaches their ports could join."
    return SpecError("PACELINE_KEY", problem, HOW_TO_GIVE_A_KEY.get(identity.launcher, BY_HAND))


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, 0))
    listener.listen(socket.SOMAXCONN)
    return listener


def _tell_on_host(
    identity: Identity, job: str, notice: Notice | None, deadline_seconds: float
) -> Notice:
    """Pass the notice through a Unix socket in the abstract namespace, named after the job."""
    name, deadline = f"\0paceline-{job}", time.monotonic() + deadline_seconds
    if notice is None:
        return _hear(name, identity, deadline, deadline_seconds)
    waiting = set(range(1, identity.members))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        try:
            door.bind(name)
        except OSError as error:
            raise ExchangeError(f"another process stands in worker0's place: {error}") from None
        door.listen(socket.SOMAXCONN)  # others call too, and wait in the same queue
        while waiting:
            door.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                visitor, _ = door.accept()
            except TimeoutError:
                missing = [member_name(index, identity.workers) for index in waiting]
                raise DeadlineError("meeting", deadline_seconds, missing) from None
            with visitor:
                if not _same_user(visitor):
                    continue
                visitor.settimeout(VISIT_SECONDS)
                with contextlib.suppress(OSError):  # it has given up, and may come again
                    index = int.from_bytes(visitor.recv(4), "little")
                    visitor.sendall(msgspec.json.encode(notice))
                    waiting.discard(index)
    return notice


def _hear(name: str, identity: Identity, deadline: float, deadline_seconds: float) -> Notice:
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            try:
                door.settimeout(max(0.001, deadline - time.monotonic()))
                door.connect(name)
                if not _same_user(door):
                    raise ExchangeError("another user's process answers in place of worker0.")
                door.sendall(identity.index.to_bytes(4, "little"))
                content = b"".join(iter(lambda: door.recv(4096), b""))
            except OSError:  # not there yet
                time.sleep(POLL_SECONDS)
                continue
        return msgspec.json.decode(content, type=Notice)
    raise DeadlineError("meeting", deadline_seconds, [member_name(0, identity.workers)])


def _same_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _tell_by_mpi(notice: Notice | None) -> Notice:
    try:
        from mpi4py import MPI
    except ImportError:
        problem = (
            "the members are on several hosts, and nobody told the coordinator's address and a key."
        )
        fix = (
            "install paceline[mpi] on all hosts, or `export PACELINE_KEY=$(openssl rand -hex 32)` "
            "and `mpirun -x PACELINE_KEY -x PACELINE_COORDINATOR=HOST_OF_RANK_0:PORT …`."
        )
        raise SpecError("mpirun", problem, fix) from None
    # Text only: a notice is decoded into its type, never unpickled.
    content = bytearray(4096)
    if notice is not None:
        encoded = msgspec.json.encode(notice)
        content[: len(encoded)] = encoded
    world: Any = MPI.COMM_WORLD
    world.Bcast([content, MPI.BYTE], root=0)
    return msgspec.json.decode(bytes(content).rstrip(b"\0"), type=Notice)
