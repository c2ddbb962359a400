"""The torch.distributed group of the workers: made once, by whichever architecture needs one."""

import ctypes
import os
import socket
from datetime import timedelta
from importlib.util import find_spec

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from paceline.architectures.base import Context
from paceline.errors import MissingError, SpecError


def join(context: Context, backend: str) -> None:
    """Join the workers' group over `backend`; returns when every worker has.

    gloo would otherwise choose an interface by resolving the host name, which on many machines
    answers with an address nobody can reach.
    """
    if dist.is_initialized():
        return
    identity = context.identity
    if backend == "nccl" and not dist.is_nccl_available():
        raise MissingError(
            "this torch has no NCCL.", "write backend=gloo, or install a CUDA build."
        )
    interface = interface_of(identity.address)
    if backend == "gloo" and interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    alone = HashStore() if context.store is None else context.store
    dist.init_process_group(
        backend,
        store=PrefixStore("group", alone),
        rank=identity.rank,
        world_size=identity.workers,
        timeout=timedelta(seconds=context.deadline_seconds),
    )


def leave() -> None:
    """Leave the group. Its threads and sockets end with the process.

    Freeing a gloo group joins its threads with the interpreter lock held, and such a thread may be
    waiting for that very lock to drop its last finished work: seen as a hang in one of ten jobs. An
    extra reference keeps every group from being freed before the process ends.
    """
    if not dist.is_initialized():
        return
    for one in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    dist.destroy_process_group()


def interface_of(address: str) -> str | None:
    """The interface that carries `address`; None when no interface of this host does."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == address for a in addresses):
            return str(name)
    return None


def backend_for(context: Context, asked: str) -> str:
    """What `auto` means here: NCCL between GPUs, MPI where its own mpirun started us, else gloo.

    NCCL wants a GPU for every worker. Where several share one, for a trial, gloo goes through main
    memory.
    """
    identity = context.identity
    if context.device.type == "cuda" and asked in ("auto", "nccl"):
        workers, gpus = min(identity.local_members, identity.workers), torch.cuda.device_count()
        if workers <= gpus:
            return "nccl"
        shared = f"{workers} workers of this host share {gpus} GPU{'s' if gpus > 1 else ''}"
        if asked == "nccl":
            problem = f"backend = nccl, and {shared}; NCCL needs one for each."
            raise SpecError("architecture", problem, f"write --workers {gpus}, or backend=gloo.")
        context.note(f"{shared}: gloo exchanges through main memory, not NCCL. A trial, no speed.")
        return "gloo"
    if asked != "auto":
        return asked
    started_by_mpi = "OMPI_COMM_WORLD_SIZE" in os.environ and identity.launcher == "mpirun"
    if started_by_mpi and identity.servers == 0 and find_spec("mpi4py") is not None:
        return "mpi"
    return "gloo"
