"""Which rank this process is, and which folder the record of the whole job goes to."""

import contextlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from paceline import spec
from paceline.errors import PacelineError
from paceline.launch import Identity, identify
from paceline.record import RunFolder, free_path
from paceline.record.entries import OBSERVED

KEY = "paceline/observe"
"""Where rank 0 leaves the folder's name in the store of the job's own process group."""

MEET_SECONDS = 20.0
"""A rank that has not heard the folder's name by then leaves no record."""

SHARED_SECONDS = 2.0
"""A folder that has not appeared by then is on a disk that this host does not share."""

WARMUP_STEPS = 5


def this_rank() -> Identity:
    """Who this process is; one worker alone where the environment makes no sense."""
    try:
        return identify(os.environ)
    except PacelineError:
        return Identity()


def host_name(identity: Identity) -> str:
    """The name the user knows this host by."""
    return platform.node() if identity.host in ("", "localhost") else identity.host


def default_folder(script: str) -> Path:
    """A new folder in runs/, named after the time and the script."""
    stem = Path(script).stem or "python"
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{stem}"


def experiment(script: str, ranks: int) -> spec.Experiment:
    """What is known of a job that nobody described: its script and how many ranks it has."""
    program = spec.Script(path=script or "python", arguments=tuple(sys.argv[1:]))
    return spec.Experiment(
        name=Path(script).stem,
        workload=spec.Workload(script=program),
        architecture=spec.Ring() if ranks > 1 else spec.Single(),
        cluster=spec.Cluster(workers=ranks),
        measurement=spec.Measurement(warmup_steps=WARMUP_STEPS),
    )


def create(path: Path, script: str, ranks: int) -> RunFolder:
    """Make the folder of a job of that many ranks; it waits for its members' files."""
    folder = RunFolder.create(path, experiment(script, ranks))
    summary = folder.summary()
    summary.engine = summary.architecture = OBSERVED
    folder.write_summary(summary)
    return folder


def agree(asked: str, script: str) -> RunFolder | None:
    """The one folder of all ranks of torch's default group; None where rank 0 could make none.

    Every rank calls it right after `init_process_group`. Only the group's store is used.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        path = ""
        try:
            path = str(free_path(Path(asked) if asked else default_folder(script)).resolve())
            folder = create(Path(path), script, dist.get_world_size())
        except BaseException:
            store.set(KEY, "")
            raise
        store.set(KEY, path)
        return folder
    store.wait([KEY], timedelta(seconds=MEET_SECONDS))
    path = store.get(KEY).decode()
    return _on_this_host(Path(path), script, dist.get_world_size()) if path else None


def _on_this_host(path: Path, script: str, ranks: int) -> RunFolder:
    """The folder as this host sees it: rank 0's, or one of the same name on this host's disk."""
    until = time.monotonic() + SHARED_SECONDS
    while not (path / "run.json").is_file():
        if time.monotonic() > until:
            with contextlib.suppress(FileExistsError):  # another rank of this host was first
                return create(path, script, ranks)
        time.sleep(0.02)
    return RunFolder(path)


def alone(asked: str, script: str, identity: Identity) -> RunFolder:
    """The folder of a process that is in no process group, whatever its launcher started."""
    path = Path(asked) if asked else default_folder(script)
    if identity.index:
        path = path.with_name(f"{path.name}-rank{identity.index}")
    return create(free_path(path).resolve(), script, 1)


def architecture_of(roots: Sequence[Any]) -> str:
    """How the ranks of this job agree on the next weights, as far as its models tell."""
    import torch.distributed as dist

    kinds = {
        base.__name__ for root in roots for one in root.modules() for base in type(one).__mro__
    }
    if "FSDPModule" in kinds:
        return "fsdp2"
    if "FullyShardedDataParallel" in kinds:
        return "fsdp"
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return "single"
    return "ddp" if "DistributedDataParallel" in kinds else "collectives"


def clock_name() -> str:
    """Members with the same one share a monotonic clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return boot.read_text(encoding="ascii").strip()
    return platform.node()
