"""The workers who began a job as one group, for a script's own numbers and for short notes."""

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.collectives.collective import Collective, connect
from paceline.collectives.elastic import Regrouped
from paceline.errors import ExchangeError, SpecError

if TYPE_CHECKING:
    from paceline.session.session import Session

NOTE_BYTES = 1 << 14
"""A note that all hear from the first worker: the state of a random generator fits."""

CALLED = "the job's script calls mean() or barrier(), which are over those who began it"
INSIDE = (
    "the job's workers agree on more than gradients: they update by themselves, or the script has "
    "hooks on its tensors"
)


class Everyone:
    """They meet when one is asked for first."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._group: Collective | None = None

    def mean(self, value: Tensor, why: str = CALLED) -> Tensor:
        """The mean of a value over the workers; every worker calls it at the same point. `why`
        nobody can join any more."""
        if self._session.workers == 1:
            return value
        if self._session.has_joined:
            problem = "this worker joined a job that ran, and means are over those who began it."
            raise SpecError(
                "mean", problem, "leave barrier() and mean() to scripts that no one joins."
            )
        self._session.close_to_newcomers(why)
        self._refuse_after_a_loss()
        together = self._together()
        while True:
            total = value.detach().to("cpu", torch.float64, copy=True).contiguous()
            together.start(total)
            with contextlib.suppress(Regrouped):
                together.finish()
                return (total / together.summed).to(value.device, value.dtype)

    def _refuse_after_a_loss(self) -> None:
        """Where those who are left do not form a group of their own, one who is lost would be
        waited for."""
        session = self._session
        lost = set(range(session.workers)) - set(session.members)
        if lost and not session.survivors.go_on:
            names = " and ".join(f"worker{rank}" for rank in sorted(lost))
            raise ExchangeError(
                f"{names} was lost, and here mean() and barrier() are over all who began: "
                "leave them to scripts that nobody is lost in, or write architecture ring."
            )

    def from_first(self, text: str) -> str:
        """The `text` of the first worker that is there, on all that are; not a long one. All call
        it at the same point, and whoever is lost meanwhile, those who are left hear the same."""
        note = torch.zeros(NOTE_BYTES, dtype=torch.uint8)
        content = text.encode()
        assert len(content) < NOTE_BYTES, "a note is short"
        note[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._together().broadcast(note)
        return note.numpy().tobytes().rstrip(b"\0").decode()

    def _together(self) -> Collective:
        if self._group is None:
            self._group = connect(self._session.context(torch.device("cpu"), -1), "gloo")
        return self._group
