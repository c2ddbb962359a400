"""Who am I: a member's role and place, read from the environment its launcher made.

Our own launcher's variables come first, then each foreign launcher's; `LAUNCHERS` is the table, in
that order. Without any of them the process is alone: one worker.
"""

from collections.abc import Callable, Mapping

import msgspec

from paceline.errors import SpecError


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One member's place in a job."""

    index: int = 0
    """Number among all members: workers first, then servers."""

    workers: int = 1
    servers: int = 0
    host: str = "localhost"
    """The host's name, for the record."""

    address: str = "127.0.0.1"
    """Where this member can be reached by the others."""

    coordinator: str = ""
    """host:port where worker 0 keeps the store; empty when there is one member only."""

    local_index: int = 0
    """Number among the members of this host."""

    local_members: int = 1
    launcher: str = "none"
    run: str = ""
    """The run folder; empty when nothing is recorded."""

    key: str = ""
    """The job's secret."""

    owns_interfaces: bool = False
    """The host is a network namespace of its own: its interfaces carry nobody else's packets."""

    coordinator_descriptor: int = -1
    """Worker 0: an inherited listening socket for the store, so that no port is guessed."""

    @property
    def role(self) -> str:
        return "worker" if self.index < self.workers else "server"

    @property
    def rank(self) -> int:
        """Number among the members of the same role."""
        return self.index if self.role == "worker" else self.index - self.workers

    @property
    def name(self) -> str:
        return f"{self.role}{self.rank}"


def identify(environ: Mapping[str, str]) -> Identity:
    """The identity that `environ` describes."""
    for read in LAUNCHERS.values():
        identity = read(environ)
        if identity is not None:
            return identity
    return Identity(run=environ.get("PACELINE_RUN", ""))


def to_environment(identity: Identity) -> dict[str, str]:
    """What our own launcher puts into a member's environment; `identify` reads it back."""
    return {"PACELINE_MEMBER": msgspec.json.encode(identity).decode()}


def from_paceline(environ: Mapping[str, str]) -> Identity | None:
    text = environ.get("PACELINE_MEMBER")
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Identity)
    except msgspec.MsgspecError as error:
        fix = "start members with `paceline run`, and leave this variable alone."
        raise SpecError("PACELINE_MEMBER", f"not a member's identity: {error}.", fix) from None


def from_torchrun(environ: Mapping[str, str]) -> Identity | None:
    """torchrun (TORCHELASTIC_RUN_ID) or anything that sets torch's own four variables."""
    if not all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    world, servers = int(environ["WORLD_SIZE"]), int(environ.get("PACELINE_SERVERS", "0"))
    return Identity(
        index=int(environ["RANK"]),
        workers=world - servers,
        servers=servers,
        coordinator=f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        local_index=int(environ.get("LOCAL_RANK", "0")),
        local_members=int(environ.get("LOCAL_WORLD_SIZE", "1")),
        launcher="torchrun",
        run=environ.get("PACELINE_RUN", ""),
    )


LAUNCHERS: dict[str, Callable[[Mapping[str, str]], Identity | None]] = {
    "paceline": from_paceline,
    "torchrun": from_torchrun,
}
