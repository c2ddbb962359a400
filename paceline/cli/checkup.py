"""How `paceline doctor` finds its members: a launcher's, one per listed host, or threads here."""

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec

from paceline.errors import MissingError
from paceline.launch import Identity, doctor, hosts, identify, meet
from paceline.launch.containers import ENGINES
from paceline.launch.doctor import Examination, Facts
from paceline.tunnel.namespaces import missing_rights


def examine(
    workers: int, asked_hosts: Sequence[str], port: int, deadline_seconds: float
) -> tuple[Identity, Examination]:
    """Who this process is among the members, and what they found."""
    if asked_hosts:
        identity = hosts.from_hosts(asked_hosts, port, os.environ)
    else:
        identity = identify(os.environ)
    if identity.launcher == "none" and workers > 1:
        return Identity(), _examine_here(workers, deadline_seconds)
    if identity.coordinator and not identity.on_one_host and not identity.key:
        # Nothing is told that is secret; a job that trains does not start without a key.
        identity = msgspec.structs.replace(identity, key="examination")
    identity = meet(identity, os.environ, deadline_seconds)
    with _listening(identity) as (known, listener):
        examination = doctor.examine(
            known, _facts(known), listener=listener, deadline_seconds=deadline_seconds
        )
    return identity, examination


def _facts(identity: Identity) -> Facts:
    rights = missing_rights()
    return doctor.gather(identity, os.environ, missing_rights=rights, engines=tuple(ENGINES))


def _examine_here(workers: int, deadline_seconds: float) -> Examination:
    """Members of this host as threads: there is nothing between them but loopback."""
    key = secrets.token_hex(32)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(workers) as pool:
        members = [
            Identity(
                index=index,
                workers=workers,
                host=socket.gethostname(),
                coordinator=f"127.0.0.1:{listener.getsockname()[1]}",
                local_index=index,
                local_members=workers,
                key=key,
            )
            for index in range(workers)
        ]
        running = [
            pool.submit(
                doctor.examine,
                member,
                _facts(member),
                listener=listener if member.index == 0 else None,
                deadline_seconds=deadline_seconds,
            )
            for member in members
        ]
        first, *_ = [future.result() for future in running]
        return first


@contextmanager
def _listening(identity: Identity) -> Iterator[tuple[Identity, socket.socket | None]]:
    """The identity with member 0's address, and on member 0 the socket that listens there."""
    if identity.members == 1:
        yield identity, None
    elif identity.store_is_kept:
        from paceline.training.checkup import listening_beside_store

        with listening_beside_store(identity) as known:
            yield known
    elif identity.index != 0:
        yield identity, None
    elif identity.coordinator_descriptor >= 0:
        with socket.socket(fileno=os.dup(identity.coordinator_descriptor)) as listener:
            yield identity, listener
    else:
        port = int(identity.coordinator.rpartition(":")[2])
        try:
            listener = socket.create_server(("", port))
        except OSError as error:
            problem = f"worker0 cannot listen on port {port} of {identity.host}: {error.strerror}."
            raise MissingError(problem, "name another: PACELINE_COORDINATOR or --port.") from None
        with listener:
            yield identity, listener
