"""Facts that one member finds out about itself, without messages and without loading torch."""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.errors import SpecError
from paceline.launch import interfaces
from paceline.launch.containers import why_unusable
from paceline.launch.identity import Identity
from paceline.record.machine import versions

SHARED_MEMORY = Path("/dev/shm")
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Requirements(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements of the job on its machines."""

    shared_memory_bytes: int = 256 * 2**20
    """Per host. A container's own /dev/shm has 64 MiB."""

    tunnel: bool = False
    container: str = ""
    """The container engine; empty when members start outside of any."""


class MemberFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one member."""

    member: str
    host: str
    address: str
    """Address at which the others can reach it, by its own account."""

    interface: str
    interface_why: str
    addresses: dict[str, str]
    """Every address of its host -> the interface that carries it."""

    versions: dict[str, str]
    cores: int
    """Cores it may run on."""

    host_cores: int
    threads: int
    """Compute threads it would use."""

    local_members: int
    load: float | None = None
    """Threads that ran or waited for a core in the last minute, on average, members not yet
    counted; None where the kernel does not say."""

    shared_memory_bytes: int | None
    """Size of /dev/shm; None where there is none."""

    shared_memory_free_bytes: int | None
    ports: tuple[int, int] | None
    """First and last port that the kernel hands out by itself."""

    missing_rights: tuple[str, ...]
    """Privileges that the tunnel needs and this process lacks."""

    container_engines: tuple[str, ...]
    """Container engines that were asked for and can start containers here."""


def gather(
    identity: Identity,
    environ: Mapping[str, str],
    *,
    missing_rights: Sequence[str] = (),
    shared_memory: Path = SHARED_MEMORY,
    engines: Sequence[str] = (),
) -> MemberFacts:
    """This member's facts. `missing_rights` come from the tunnel, which knows what it needs.

    `engines` are the container engines to look for; asking docker takes a moment.
    """
    network = interfaces.this_network()
    cores = len(os.sched_getaffinity(0))
    size, free = _shared_memory(shared_memory)
    return MemberFacts(
        member=identity.name,
        host=identity.host,
        address=identity.address,
        interface=network.addresses.get(identity.address, ""),
        interface_why=_why(identity, environ, network),
        addresses=dict(network.addresses),
        versions={"python": platform.python_version(), **versions()},
        cores=cores,
        host_cores=os.cpu_count() or cores,
        threads=_threads(environ, cores),
        local_members=identity.local_members,
        load=_load(),
        shared_memory_bytes=size,
        shared_memory_free_bytes=free,
        ports=_ports(),
        missing_rights=tuple(missing_rights),
        container_engines=tuple(name for name in engines if not why_unusable(name)),
    )


def _why(identity: Identity, environ: Mapping[str, str], network: interfaces.HostNetwork) -> str:
    """Why this address: the reason we would choose it for, else the one given by what started the
    member."""
    towards = identity.coordinator.rpartition(":")[0]
    try:
        choice = interfaces.choose(
            environ, towards=towards, on_one_host=identity.on_one_host, network=network
        )
    except SpecError:
        choice = None
    if choice is not None and choice.address == identity.address:
        return choice.why
    return "the launcher said so"


def _threads(environ: Mapping[str, str], cores: int) -> int:
    """OpenMP's number, which may be a list, one per level of nesting; without it, all cores."""
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdigit() else cores


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _shared_memory(path: Path) -> tuple[int | None, int | None]:
    try:
        state = os.statvfs(path)
    except OSError:
        return None, None
    return state.f_frsize * state.f_blocks, state.f_frsize * state.f_bavail


def _ports() -> tuple[int, int] | None:
    try:
        first, last = PORT_RANGE.read_text().split()
    except (OSError, ValueError):
        return None
    return int(first), int(last)
