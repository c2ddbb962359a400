"""Checkpoints: everything a run needs to continue as if it had never stopped.

The order of samples, the learning rate and the random numbers of a step are functions of the step,
so a checkpoint holds the weights, the optimizer's state and the number of the next step; and what
an architecture keeps from step to step (`KeepsState`), which each worker saves for itself. Which
files there are and whether they are whole is `record/checkpoints.py`.
"""

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import nn
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError
from torch.optim import Optimizer

from paceline import spec
from paceline.architectures.base import Architecture, KeepsState
from paceline.errors import RecordError, SpecError
from paceline.record import checkpoints
from paceline.record.checkpoints import FOLDER, FORMAT_VERSION, File, Found, Manifest
from paceline.record.folder import FULL
from paceline.session.stores import DEADLINE_SECONDS

LOOK = timedelta(seconds=0.5)
"""Wait for a worker's part before looking whether all workers are still there."""

ROOM_BYTES = 1 << 16
"""A disk with less is full, whatever the words of who could not write."""

UNREADABLE = (RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError)


def save(
    run: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    architecture: Architecture,
    experiment: spec.Experiment,
    store: Store | None,
    rank: int = 0,
    members: Sequence[int] | None = None,
    must_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Write the state before `step`; each of the `members` (left out: all workers) calls it, after
    `settle`. The first writes what all have. `must_stop`: one of them is lost.

    A reader sees the whole checkpoint or none: its last file is written when all others are
    there. Raises RecordError, on that worker, where it could not be written; nothing that was there
    before is touched.
    """
    name = f"step-{step:08d}"
    members = range(experiment.cluster.workers) if members is None else members
    kept = architecture.state() if isinstance(architecture, KeepsState) else {}
    keeps, own = bool(kept), {"step": step, "architecture": kept}
    if rank != members[0]:
        if keeps:
            _tell(
                store, f"{name}.worker{rank}", lambda: _write(run, f"{name}.worker{rank}.pt", own)
            )
        return
    content = {**own, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    files = {f"{name}.pt": _write(run, f"{name}.pt", content)}
    for worker in members[1:] if keeps else ():
        files[f"{name}.worker{worker}.pt"] = _told(store, f"{name}.worker{worker}", must_stop)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        step=step,
        files=files,
        facts=msgspec.structs.replace(checkpoints.facts_of(experiment), workers=len(members)),
    )
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    _place(run, f"{name}.json", lambda file: file.write(encoded))


def _write(run: Path, name: str, content: dict[str, Any]) -> File:
    _place(run, name, lambda file: torch.save(content, file))
    return checkpoints.describe(run / FOLDER / name)


def _place(run: Path, name: str, write: Callable[[BinaryIO], Any]) -> None:
    """A file that is there as a whole or not at all, after a loss of power too."""
    folder = run / FOLDER
    target, partial = folder / name, folder / f".{name}.{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
        _fsync(folder)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
        reason = _reason(error, folder)  # while the part that was written fills it
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise RecordError(f"{target} cannot be written: {reason}.") from error


def _fsync(folder: Path) -> None:
    """The names in it, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception, folder: Path) -> str:
    if isinstance(error, OSError) and error.errno in FULL:
        return "the disk is full"
    if isinstance(error, RuntimeError):
        with contextlib.suppress(OSError):
            room = os.statvfs(folder)
            if room.f_bavail * room.f_frsize < ROOM_BYTES:
                return "the disk is full"
        return str(error).splitlines()[0].rstrip(".")
    return getattr(error, "strerror", None) or str(error)


def _tell(store: Store | None, name: str, write: Callable[[], File]) -> None:
    """Write a worker's own part, and tell worker 0 what was written, or why it was not."""
    assert store is not None, "there are several workers"
    try:
        told = {"file": msgspec.to_builtins(write())}
    except RecordError as error:
        told = {"error": str(error)}
    with contextlib.suppress(DistNetworkError):  # who would read it is lost
        store.set(f"checkpoint/{name}", msgspec.json.encode(told).decode())


def _told(store: Store | None, name: str, must_stop: Callable[[], bool]) -> File:
    assert store is not None, "there are several workers"
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(DistStoreError):
            store.wait([f"checkpoint/{name}"], LOOK)
            break
        if must_stop():
            raise RecordError(f"{name}.pt was not written, as a worker was lost.")
    told = msgspec.json.decode(store.get(f"checkpoint/{name}"))
    if "error" in told:
        raise RecordError(told["error"])
    return msgspec.convert(told["file"], File)


def load(found: Found, *, model: nn.Module, optimizer: Optimizer) -> int:
    """Put a checkpoint's state into `model` and `optimizer`; return the step that comes next."""
    path = found.path.with_suffix(".pt")
    state = _read(path)
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except UNREADABLE as error:
        problem = f"{path} does not fit this model: {str(error).splitlines()[0]}"
        raise SpecError("resume", problem, "resume with the same model and optimizer.") from None


def load_own(found: Found, architecture: Architecture, member: str, *, own: bool) -> None:
    """Give an architecture what it kept; called after `distribute`. Not `own`: there were more or
    fewer workers, and worker 0's has to do for all."""
    path = found.file(member if own else "worker0")
    if not isinstance(architecture, KeepsState) or path is None:
        return
    state = _read(path).get("architecture")
    try:
        if state:
            architecture.restore(state, own=own)
    except UNREADABLE as error:
        problem = f"{path} does not fit this architecture: {str(error).splitlines()[0]}"
        raise SpecError("resume", problem, "resume with the same architecture.") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, *UNREADABLE) as error:
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpecError("resume", f"{path} cannot be read: {told}", checkpoints.FIX) from None
    if not isinstance(state, dict):
        raise SpecError("resume", f"{path} is not a checkpoint.", checkpoints.FIX)
    return state
