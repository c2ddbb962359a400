"""A worker that joins a job which runs: where the job is, and how that reaches the worker.

Our own launcher leaves an invitation in the run folder, for this user's eyes only. Jobs that others
started are joined by the address of their coordinator, with PACELINE_KEY as the job has it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline.errors import SpecError
from paceline.launch.identity import Identity
from paceline.record import RunFolder

FILE = "join.json"
VARIABLE = "PACELINE_JOIN"


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a worker needs to join a job."""

    coordinator: str
    key: str


def invite(run: Path, identity: Identity) -> None:
    """Leave an invitation to this member's job in its run folder."""
    invitation = Invitation(coordinator=identity.coordinator, key=identity.key)
    content = msgspec.json.encode(invitation)
    with os.fdopen(os.open(run / FILE, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(content)


def withdraw(run: Path) -> None:
    """The job is over."""
    (run / FILE).unlink(missing_ok=True)


def read_invitation(text: str, environ: Mapping[str, str]) -> Invitation:
    """What `--join` names: a run folder, or HOST:PORT."""
    path = Path(text)
    if path.is_dir():
        fix = "name the folder of a job that `paceline run` has started and that still runs."
        try:
            found = msgspec.json.decode((path / FILE).read_bytes(), type=Invitation)
        except (OSError, msgspec.MsgspecError):
            problem = f"no job runs in {text} that could be joined from here."
            raise SpecError("--join", problem, fix) from None
        if RunFolder(path).launcher_is_gone:
            raise SpecError("--join", f"the job in {text} was killed, and nobody answers.", fix)
        return found
    address, colon, port = text.rpartition(":")
    if not (address and colon and port.isdecimal() and 0 < int(port[:6]) < 1 << 16):
        problem = f'"{text}" is neither a run folder nor an address.'
        raise SpecError(
            "--join", problem, "name the folder of a run, or the coordinator HOST:PORT."
        )
    if not environ.get("PACELINE_KEY"):
        problem = "a job lets nobody in without its key, and PACELINE_KEY is not set."
        raise SpecError("--join", problem, "set it to the job's, or name the folder of the run.")
    return Invitation(coordinator=text, key=environ["PACELINE_KEY"])


def to_environment(invitation: Invitation) -> dict[str, str]:
    """How `paceline run --join` hands it to the worker; `identify` reads it back."""
    return {VARIABLE: invitation.coordinator, "PACELINE_KEY": invitation.key}


def identify(environ: Mapping[str, str]) -> Identity | None:
    """A worker without a number: the job gives it one."""
    coordinator = environ.get(VARIABLE, "")
    if not coordinator:
        return None
    key = environ.get("PACELINE_KEY", "")
    # Not worker 0, and not alone; the rest the job will tell.
    return Identity(launcher="join", index=1, workers=2, coordinator=coordinator, key=key)
