"""The workers that began a job as one group: a script's own means, and short texts for all."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.collectives.collective import Collective
from paceline.collectives.view_collective import ExchangeVoid
from paceline.errors import ExchangeError, SpecError
from paceline.session.join_obstacle import JoinObstacle
from paceline.session.participants import Participants

TEXT_BYTES = 1 << 14
"""Size of a text for all, at most: the state of a random generator fits."""

CALLED = "the job's script calls mean() or barrier(), which are over those who began it"
INSIDE = (
    "the job's workers agree on more than gradients: they update by themselves, or the script has "
    "hooks on its tensors"
)


class ScriptGroup:
    """Created lazily: the first call connects all workers."""

    def __init__(
        self,
        participants: Participants,
        obstacle: JoinObstacle,
        connect: Callable[[], Collective],
        regroups: Callable[[], bool],
    ) -> None:
        """`regroups`: whether the remaining workers form a new group when one has failed."""
        self._participants, self._obstacle, self._connect = participants, obstacle, connect
        self.regroups = regroups
        self._group: Collective | None = None

    def mean(self, value: Tensor, reason: str = CALLED) -> Tensor:
        """Return the mean of a value over the workers; every worker calls it at the same point.

        `reason`: why no worker can join the job from now on.
        """
        if self._participants.workers == 1:
            return value
        # Joined workers take part in means that architectures ask for, at the same point of a step.
        is_of_all = reason == INSIDE and self.regroups()
        if self._participants.has_joined and not is_of_all:
            problem = "this worker joined a job that ran, and means are over those who began it."
            raise SpecError(
                "mean", problem, "leave barrier() and mean() to scripts that no one joins."
            )
        if not is_of_all:
            self._obstacle.close(reason)
        self._refuse_after_failure()
        together = self._together()
        while True:
            total = value.detach().to("cpu", torch.float64, copy=True).contiguous()
            together.start(total)
            with contextlib.suppress(ExchangeVoid):
                together.finish()
                return (total / together.summed).to(value.device, value.dtype)

    def mean_inside(self, value: Tensor) -> Tensor:
        """Return the mean of a value that an architecture asks for."""
        return self.mean(value, INSIDE)

    def _refuse_after_failure(self) -> None:
        """A failed worker would be waited for, unless the others form a group of their own."""
        participants = self._participants
        failed = set(range(participants.workers)) - set(participants.members)
        if failed and not self.regroups():
            names = " and ".join(f"worker{rank}" for rank in sorted(failed))
            raise ExchangeError(
                f"{names} was lost, and here mean() and barrier() are over all who began: "
                "leave them to scripts that nobody is lost in, or write architecture ring."
            )

    def from_first(self, text: str) -> str:
        """Return the `text` of the first worker that is present, on all that are.

        All call it at the same point with a short text. If a worker fails meanwhile, the remaining
        ones still get the same text.
        """
        note = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        content = text.encode()
        assert len(content) < TEXT_BYTES, "the text is short"
        note[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._together().broadcast(note)
        return note.numpy().tobytes().rstrip(b"\0").decode()

    def _together(self) -> Collective:
        if self._group is None:
            self._group = self._connect()
        return self._group
