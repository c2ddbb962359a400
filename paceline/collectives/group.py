"""A torch process group of the workers that is Paceline's own.

Not torch's default group: a script may call `init_process_group` itself, before or after us.
"""

import contextlib
import ctypes
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from paceline.collectives.context import Context
from paceline.collectives.proof import proven
from paceline.collectives.views import ViewChanged, Views
from paceline.errors import DeadlineError, ExchangeError, MissingError, SpecError
from paceline.wire.gloo_ports import shut_listeners

T = TypeVar("T")

LOOK_SECONDS = 5.0
"""So long a collective is waited for before somebody looks whether all are still there."""

ROLL_CALL_SECONDS = 2.0
"""Workers that gave up waiting leave their names within moments of each other."""

ULFM = "OMPI_MCA_mpi_ft_enable"
"""Set by `mpirun --with-ft ulfm`."""

KEPT_WORKS = 16
"""Gloo's two threads let go of a work as soon as it is done, long before so many others are."""

PIECE = 1 << 18
"""Numbers that are broadcast at once."""

VIEW_LOOK_SECONDS = 0.1
"""The same where the others go on without one that is lost: who does not send to the lost one
itself would wait for ever."""


class Group:
    """The `members` (all workers when left out) over gloo or NCCL; made by each of them at once."""

    def __init__(
        self, context: Context, backend: str, members: Sequence[int] | None = None
    ) -> None:
        identity = context.identity
        self.members = tuple(range(identity.workers) if members is None else members)
        self.rank = self.members.index(identity.rank)
        self._context = context
        self._is_gloo = backend == "gloo"  # NCCL's wait returns at once
        make = _nccl if backend == "nccl" else _gloo
        self._group = watched(
            lambda: kept(make(context, _own_store(context, backend, self.members), self.members)),
            context,
        )
        self._lent: dict[int, Any] = kept({})
        self._works: deque[Any] = kept(deque(maxlen=KEPT_WORKS))
        """What gloo's threads may still hold."""

    def all_reduce(self, flat: Tensor) -> "Operation":
        work = self._group.allreduce([self._lend(flat)])
        return Operation(self._wait_for_all, self._keep(work))

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Overwrite `flat` with that of the first member, or of the one at another place.

        Piece by piece through a small tensor: what was lent is kept for a while, and all weights at
        once would be one more copy of them.
        """
        lent = torch.empty(min(flat.numel(), PIECE), dtype=flat.dtype, device=flat.device)
        for piece in flat.split(PIECE):
            part = lent[: piece.numel()].copy_(piece)
            self._wait_for_all(self._keep(self._group.broadcast(self._lend(part), source)))
            piece.copy_(part)

    def send(self, flat: Tensor, to: int, tag: int) -> "Operation":
        work = self._group.send([self._lend(flat)], to, tag)
        return Operation(self._wait, self._keep(work))

    def receive(self, flat: Tensor, source: int, tag: int) -> "Operation":
        work = self._group.recv([self._lend(flat)], source, tag)
        return Operation(self._wait, self._keep(work))

    def _lend(self, flat: Tensor) -> Tensor:
        """Keep a tensor until gloo's thread has let go of it.

        Whoever lets go last of what Python knows needs the interpreter's lock, and a thread that
        waits for it when the interpreter ends is ended inside a destructor, which aborts the
        process: seen after the last step of one job in thirty (decision 0164).
        """
        if self._is_gloo:
            for key, tensor in list(self._lent.items()):
                if tensor._use_count() == 1:  # nobody but us
                    del self._lent[key]
            self._lent[id(flat)] = flat
        return flat

    def _keep(self, work: Any) -> Any:
        """A work holds Python's state of the thread that began it: the same for the last ones."""
        if self._is_gloo:
            self._works.append(work)
        return work

    def _wait_for_all(self, work: Any) -> None:
        """What all take part in never ends when one has left: look now and then whether one has."""
        views, has_left = self._context.views, False
        look = timedelta(seconds=LOOK_SECONDS if views is None else VIEW_LOOK_SECONDS)
        while self._is_gloo and not _ends_within(work, look):
            if views is not None:
                look_at(views, self._context)
            if views is None and has_left:
                self._explain(RuntimeError("a collective without all of its members"))
            has_left = views is None and bool(
                self._context.membership.ended()
            )  # its last bytes may come yet
        self._wait(work)

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            views = self._context.views
            if views is not None and views.notices():
                raise ViewChanged from error
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """Raise what is behind a failure, where that is known."""
        if ended := self._context.membership.ended():
            raise ended_early(ended, self._context.identity.name) from error


def _ends_within(work: Any, seconds: timedelta) -> bool:
    try:
        work.wait(seconds)
    except RuntimeError:
        return bool(work.is_completed())
    return True


def kept(thing: Any) -> Any:
    """Freeing a gloo group joins its threads with the interpreter lock held, and such a thread may
    be waiting for that very lock to drop its last finished work: seen as a hang in one of ten jobs.
    An extra reference keeps it until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def _own_store(context: Context, backend: str, members: Sequence[int]) -> Store:
    """Where a group meets: a part of the store that no other group of these members has had.

    Members make the groups that they share in the same order, so the number of those before is the
    same on each. A failure breaks that order, so the name has the number of the view.
    """
    store: Store = HashStore() if context.store is None else context.store
    view = "" if context.views is None else str(context.views.view.number)
    name = "/".join(["group", backend, view, "-".join(map(str, members))])
    number = store.add(f"{name}/made/{context.identity.rank}", 1)
    return PrefixStore(f"{name}/{number}", store)


def watched(make: Callable[[], T], context: Context) -> T:
    """What `make` makes together with others; where one may be lost meanwhile, in a thread that is
    left behind then."""
    views = context.views
    if views is None:
        return make()
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name="paceline-group", daemon=True).start()
    while not wait([made], VIEW_LOOK_SECONDS).done:
        look_at(views, context)
    try:
        return made.result()
    except (dist.DistError, RuntimeError, ExchangeError) as error:
        if views.notices():
            raise ViewChanged from error
        raise


def look_at(views: Views, context: Context) -> None:
    """Called now and then while an exchange is waited for: it cannot end if a participant has
    failed; if another worker asks to join, the coordinator hears where this one is."""
    if views.must_stop:
        raise ViewChanged
    views.report(context.training.progress())


class Operation:
    """Something under way in a group."""

    def __init__(self, wait: Callable[[Any], None], work: Any) -> None:
        self._wait, self._work = wait, work

    def wait(self) -> None:
        self._wait(self._work)


def ended_early(ended: dict[str, int], waiting: str) -> ExchangeError:
    """The error of a worker that waits for others which have ended well, but too early."""
    names = ", ".join(f"{name} ended after {steps} steps" for name, steps in sorted(ended.items()))
    return ExchangeError(
        f"{names}, and {waiting} goes on: every worker must take the same number of steps. "
        "Take batches from paceline.shard(loader), and skip or stop on all workers alike."
    )


def ran_out(error: Exception) -> bool:
    """Whether gloo gave up because time was up."""
    return "imeout" in str(error) or "imed out" in str(error)


def missing_at(context: Context, operation: str, members: Iterable[int]) -> DeadlineError:
    """The error of a wait that ran out, with the names of the workers that never got there.

    A collective cannot say who is late. Those who waited in vain call the roll through the store;
    who does not answer is missing.
    """
    names = {rank: f"worker{rank}" for rank in members}
    missing = list(names.values())
    if context.store is not None:
        context.store.set(f"waited/{operation}/{context.identity.rank}", "")
        missing = []
        for rank, name in names.items():
            try:
                context.store.wait(
                    [f"waited/{operation}/{rank}"], timedelta(seconds=ROLL_CALL_SECONDS)
                )
            except (dist.DistError, RuntimeError):
                missing.append(name)
    return DeadlineError(operation, context.deadline_seconds, missing)


def _gloo(context: Context, store: Store, members: Sequence[int]) -> Any:
    if len(members) == 1:
        return _one_gloo(context, store, members)
    return proven(context, store, members, lambda own: _one_gloo(context, own, members), kept)


def _one_gloo(context: Context, store: Store, members: Sequence[int]) -> Any:
    # gloo would otherwise choose an interface by resolving the host name, which on many machines
    # answers with an address nobody can reach.
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    interface = interface or interface_of(context.identity.address) or ""
    device = kind.create_device(interface=interface) if interface else kind.create_default_device()
    options._devices, options._threads = [device], 2
    options._timeout = timedelta(seconds=context.deadline_seconds)
    rank = members.index(context.identity.rank)
    group = kind(store, rank, len(members), options)
    with contextlib.suppress(OSError):  # all have met: from here on only strangers would call
        shut_listeners(store.get(f"0/{rank}"))
    return group


def _nccl(context: Context, store: Store, members: Sequence[int]) -> Any:
    if not dist.is_nccl_available():
        raise MissingError(
            "this torch has no NCCL.", "write backend=gloo, or install a CUDA build."
        )
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=context.deadline_seconds)
    rank = members.index(context.identity.rank)
    return kind(_nccls_own_store(context, store, rank), rank, len(members), options)


def _nccls_own_store(context: Context, store: Store, rank: int) -> Store:
    """A store of torch's, whose address the job's store tells.

    NCCL's watchdogs ask it from threads that outlive the interpreter, which a store in Python must
    not be asked from. It is as open as NCCL's own connections are (docs/security.md).
    """
    patience = timedelta(seconds=context.deadline_seconds)
    if rank == 0:
        own = TCPStore(
            context.identity.address, 0, is_master=True, wait_for_workers=False, timeout=patience
        )
        store.set("nccl", f"{context.identity.address}:{own.port}")
        return own
    address, _, port = store.get("nccl").decode().rpartition(":")
    return TCPStore(address, int(port), is_master=False, timeout=patience)


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


def goes_on(backend: str) -> bool:
    """Whether those who are left can go on over it: gloo by views, MPI with ULFM by itself."""
    return backend == "gloo" or (backend == "mpi" and os.environ.get(ULFM) == "1")
