"""A record of a script that another launcher started: `paceline run` makes its own.

With PACELINE_OBSERVE=FOLDER worker 0 makes the run folder and leaves its name in the job's store;
without it one line says how to get a record.
"""

import contextlib
import os
import sys
from pathlib import Path

from torch._C._distributed_c10d import Store

from paceline import spec
from paceline.launch import Identity
from paceline.record import RunFolder, free_path

FOLDER = "PACELINE_OBSERVE"
KEY = "record/folder"
FOREIGN = ("torchrun", "mpirun", "srun", "kubernetes")
"""Launchers that make no run folder."""


def folder_of(
    identity: Identity, asked: spec.Architecture, store: Store | None
) -> RunFolder | None:
    """The folder in which this job is recorded, the same for all members; None for no record."""
    wanted = os.environ.get(FOLDER, "")
    if not wanted:
        if identity.launcher in FOREIGN and identity.index == 0 and identity.workers > 1:
            text = "this job leaves no record; start it with PACELINE_OBSERVE=FOLDER to have one"
            print(f"paceline: {text}.", file=sys.stderr)
        return None
    experiment = _experiment(identity, asked)
    if store is None:
        return RunFolder.create(free_path(Path(wanted)).resolve(), experiment)
    if identity.index == 0:
        folder = RunFolder.create(free_path(Path(wanted)).resolve(), experiment)
        store.set(KEY, str(folder.path))
        return folder
    path = Path(store.get(KEY).decode())
    if not path.exists():  # a host with a disk of its own
        with contextlib.suppress(FileExistsError):  # another member of this host was first
            RunFolder.create(path, experiment)
    return RunFolder(path)


def _experiment(identity: Identity, asked: spec.Architecture) -> spec.Experiment:
    program = spec.Script(path=sys.argv[0] or "python", arguments=tuple(sys.argv[1:]))
    return spec.Experiment(
        name=Path(sys.argv[0]).stem,
        workload=spec.Workload(script=program),
        architecture=asked,
        cluster=spec.Cluster(workers=identity.workers, servers=identity.servers),
    )
