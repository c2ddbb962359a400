"""The place of a job in its batches: a worker that joins continues at the batch of its first step.

It runs the same script from the top and leaves out what the others have done. So it can join only
if each step of the script takes one batch, and each pass over the loader runs to its end. The
workers that are present check this in what they draw. The joining worker learns from them at which
batch of which step they are, compares, and begins at its own.
"""

import time
from collections.abc import Sized

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from paceline.errors import ExchangeError, JobOver, SpecError
from paceline.session.join_obstacle import JoinObstacle
from paceline.session.participants import Participants
from paceline.session.stores import DEADLINE_SECONDS, POLL_SECONDS, unanswered

Position = tuple[int, int]
"""The number of a pass, and of a batch in it."""

IRREGULAR = "the job's script takes other than one batch for each step, pass after pass"


class Positions:
    """The positions of one worker's sharded loader."""

    def __init__(
        self,
        participants: Participants,
        obstacle: JoinObstacle,
        store: Store | None,
        *,
        exclusive: bool,
    ) -> None:
        """`exclusive`: all workers take the same steps."""
        self._participants, self._obstacle, self._store = participants, obstacle, store
        self._exclusive = exclusive
        self._asking: list[int] = []
        """Joining workers that have not learnt yet where the job is."""

        self._joined_in: dict[int, int] = {}
        """Joined worker -> the pass that it came in."""

        self._last: Position = (0, -1)

    def welcome(self, rank: int) -> None:
        """A worker takes part from the next batch on."""
        self._asking.append(rank)

    def forget(self, rank: int) -> None:
        """A worker failed or left, so it no longer matters how it counts its batches."""
        self._joined_in.pop(rank, None)
        if rank in self._asking:
            self._asking.remove(rank)

    def hand_over(self, position: Position, order: Sized) -> None:
        """A batch of the `order` goes to the script."""
        obstacle, store, step = self._obstacle, self._store, self._participants.step
        is_over = obstacle.is_final and not (self._asking or self._joined_in)
        if is_over or not self._participants.may_grow or store is None:
            return
        length = len(order)
        if position != divmod(step, length):
            obstacle.close(IRREGULAR)
        self._refuse_broken_pass(position, length)
        self._last = position
        for rank in self._asking:
            store.set(f"position/{rank}", "/".join(map(str, (*position, step))))
            self._joined_in[rank] = position[0]
        self._asking.clear()

    def _refuse_broken_pass(self, position: Position, length: int) -> None:
        number, index = self._last
        is_broken = position[0] > number and index + 1 < length
        inside = [rank for rank, came in self._joined_in.items() if came == number]
        if is_broken and self._exclusive and inside:
            names = " and ".join(f"worker{rank}" for rank in inside)
            raise ExchangeError(
                f"the script breaks off a pass over its loader, and {names} joined in the middle "
                "of it: it may count its batches otherwise. Start the job with all its workers."
            )

    def find(self, length: int) -> Position:
        """Return the batch that this joining worker begins with; a pass has `length` batches."""
        assert self._store is not None, "there are others"
        number, index, step = map(int, self._ask(self._store).split("/"))
        if (number, index) != divmod(step, length):
            fix = "start the job with all its workers."
            raise SpecError("--join", f"{IRREGULAR}.", fix)
        return divmod(self._participants.first_step, length)

    def _ask(self, store: Store) -> str:
        """Return what an initial worker leaves at its next batch; none comes once all have
        ended."""
        participants = self._participants
        key, identity = f"position/{participants.rank}", participants.identity
        operation, end = "learning which batch comes next", time.monotonic() + DEADLINE_SECONDS
        initial = [r for r in participants.members if r < participants.workers]
        try:
            while time.monotonic() < end:
                is_over = all(store.check([f"ended/worker{rank}"]) for rank in initial)
                if store.check([key]):
                    break
                if is_over:
                    raise JobOver(f"the others have finished, and so has {identity.name}.").told()
                time.sleep(POLL_SECONDS)
            return bytes(store.get(key)).decode()
        except (DistError, RuntimeError) as error:
            raise unanswered(error, identity, operation) from error
