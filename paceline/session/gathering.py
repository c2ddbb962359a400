"""Bring the records of members on other file systems into worker 0's run folder.

A member that cannot see worker 0's folder writes a copy of its own, and sends its files when it
leaves.
"""

from collections.abc import Container, Iterable
from pathlib import Path

import msgspec
from torch._C._distributed_c10d import Store

from paceline import spec
from paceline.errors import ExchangeError
from paceline.launch import Identity
from paceline.record import RunFolder
from paceline.session import stores

MARK = ".copy"


def make_copy(path: Path, experiment: spec.Experiment) -> RunFolder:
    """A run folder for the members of a host that does not see worker 0's."""
    try:
        folder = RunFolder.create(path, experiment)
    except FileExistsError:  # another member of this host was first
        return RunFolder(path)
    folder.write(MARK, b"")
    return folder


def leave(
    store: Store,
    identity: Identity,
    folder: RunFolder | None,
    workers: Iterable[int],
    gone: Container[str],
) -> None:
    """Leave the job (see `stores.leave`), and bring the records together on the way."""
    sent = "" if folder is None else pack(folder, identity.name)
    records = stores.leave(store, identity, workers, sent, gone)
    if folder is not None:
        unpack(folder, records)


def pack(folder: RunFolder, member: str) -> str:
    """Return the record of `member` as text; empty if worker 0 sees its files."""
    if not (folder.path / MARK).exists():
        return ""
    files = sorted((folder.path / "members").glob(f"{member}.*"))
    return msgspec.json.encode({path.name: path.read_text("utf-8") for path in files}).decode()


def unpack(folder: RunFolder, packed: dict[str, str]) -> None:
    """Write what members sent (name -> text); each may write its own files and no other."""
    for member, text in packed.items():
        try:
            files = msgspec.json.decode(text, type=dict[str, str])
        except msgspec.MsgspecError as error:
            raise ExchangeError(f"{member} sent a record that makes no sense: {error}") from None
        for name, content in files.items():
            if "/" in name or not name.startswith(f"{member}."):
                raise ExchangeError(f"{member} sent a file that is not its own: {name}")
            folder.write(f"members/{name}", content.encode())
