"""The identity of a process: a member's role and place in a job, as data, and how our own launcher
passes it on.

The files named after launchers read an Identity from the environment those make; `launchers.py`
holds their table.
"""

import platform
from collections.abc import Mapping

import msgspec

from paceline.errors import SpecError
from paceline.launch import interfaces


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one member in a job."""

    index: int = 0
    """Number among all members: workers first, then servers."""

    workers: int = 1
    servers: int = 0
    host: str = "localhost"
    """Name of the host, for the record."""

    address: str = "127.0.0.1"
    """Address at which the other members reach this one."""

    coordinator: str = ""
    """host:port where the store is kept; empty when there is one member, or before `meet`."""

    local_index: int = 0
    """Number among the members of this host."""

    local_members: int = 1
    local_workers: int = 1
    """Number of workers on this host; they are numbered first."""

    launcher: str = "none"
    run: str = ""
    """The run folder; empty when nothing is recorded."""

    key: str = ""
    """Secret key of the job."""

    owns_interfaces: bool = False
    """The host is a network namespace of its own: its interfaces carry only its packets."""

    coordinator_descriptor: int = -1
    """Worker 0: an inherited listening socket for the store, so that no port is guessed."""

    store_is_kept: bool = False
    """The launcher itself serves the store at `coordinator`; worker 0 joins it like the others."""

    master: str = ""
    """host:port kept free on worker 0's host, for a script that makes torch's own groups."""

    founders: int = 0
    """Number of workers that began the job, for a worker that joined it; otherwise 0."""

    goes_on: bool = False
    """The others continue without a failed worker (`on_loss = "continue"`)."""

    attempt: int = 0
    """Number of times the launcher has restarted this job; notes in a kept store outlive an
    attempt."""

    @property
    def role(self) -> str:
        return "worker" if self.index < self.workers else "server"

    @property
    def rank(self) -> int:
        """Number among the members of the same role."""
        return self.index if self.role == "worker" else self.index - self.workers

    @property
    def name(self) -> str:
        return member_name(self.index, self.workers)

    @property
    def has_joined(self) -> bool:
        """Return whether it joined a running job."""
        return self.founders > 0

    @property
    def members(self) -> int:
        return self.workers + self.servers

    @property
    def on_one_host(self) -> bool:
        return self.local_members == self.members


def member_name(index: int, workers: int) -> str:
    return f"worker{index}" if index < workers else f"server{index - workers}"


TORCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables that torch's own launcher sets and torch.distributed reads; a member inherits none of
them."""


ON_LOSS = "PACELINE_ON_LOSS"
"""Variable that tells members under another launcher what a failure means; it must be the same on
all."""


def to_environment(identity: Identity) -> dict[str, str]:
    """What our own launcher puts into a member's environment; `identify` reads it back.

    A worker gets what torchrun would tell it as well, for scripts that look there. Ours is asked
    first, so it is never taken for one of torchrun's.
    """
    told = {"PACELINE_MEMBER": msgspec.json.encode(identity).decode()}
    if identity.role == "worker" and identity.master:
        address, _, port = identity.master.rpartition(":")
        told |= {
            "RANK": str(identity.rank),
            "WORLD_SIZE": str(identity.workers),
            "LOCAL_RANK": str(identity.local_index),
            "LOCAL_WORLD_SIZE": str(identity.local_workers),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
    return told


def from_paceline(environ: Mapping[str, str]) -> Identity | None:
    text = environ.get("PACELINE_MEMBER")
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Identity)
    except msgspec.MsgspecError as error:
        fix = "start members with `paceline run`, and leave this variable alone."
        raise SpecError("PACELINE_MEMBER", f"not a member's identity: {error}.", fix) from None


def from_launcher(
    environ: Mapping[str, str],
    launcher: str,
    *,
    index: int,
    members: int,
    local_index: int,
    local_members: int,
    coordinator: str = "",
    host: str = "",
    store_is_kept: bool = False,
    attempt: int = 0,
) -> Identity:
    """A foreign launcher's facts as an Identity: roles dealt, the address to be reached at chosen.

    A coordinator that only this host can reach is refused when there are members elsewhere.
    """
    servers = integer(environ, "PACELINE_SERVERS", default=0)
    if not 0 <= index < members:
        problem = f"member {index} of {members}: numbers go from 0 to {members - 1}."
        raise SpecError(launcher, problem, "start as many members as the launcher was told.")
    if not 0 <= servers < members:
        problem = f"{servers} servers among the {members} members that {launcher} started."
        raise SpecError("--servers", problem, "leave at least one member to be a worker.")
    coordinator = environ.get("PACELINE_COORDINATOR", coordinator) if members > 1 else ""
    on_one_host = local_members == members
    towards, _, port = coordinator.rpartition(":")
    if coordinator and not (towards and port.isdecimal() and 0 < int(port) < 2**16):
        problem = f'"{coordinator}" is not a host and a port.'
        raise SpecError("PACELINE_COORDINATOR", problem, 'write it as "HOST:PORT".')
    if not on_one_host and interfaces.is_loopback(towards):
        problem = (
            f"the coordinator is {coordinator}, which only its own host can reach, but "
            f"{members - local_members} of {members} members run on other hosts."
        )
        fix = "name the host of member 0 to the launcher, or set PACELINE_COORDINATOR=HOST:PORT."
        raise SpecError(launcher, problem, fix)
    return Identity(
        index=index,
        workers=members - servers,
        servers=servers,
        host=host or platform.node(),
        address=interfaces.choose(environ, towards=towards, on_one_host=on_one_host).address,
        coordinator=coordinator,
        local_index=local_index,
        local_members=local_members,
        launcher=launcher,
        run=environ.get("PACELINE_RUN", ""),
        key=environ.get("PACELINE_KEY", ""),
        store_is_kept=store_is_kept,
        attempt=attempt,
        goes_on=environ.get(ON_LOSS) == "continue",
    )


def integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The number in a variable that the launcher promises to set."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        given = "is not set" if text is None else f'= "{text}" is not a whole number'
        fix = "start members with one launcher only, and leave its variables alone."
        raise SpecError("environment", f"{name} {given}.", fix) from None
