"""Where in its batches a job is: a worker that joins goes on at the batch of its first step.

It runs the same script from the top and leaves out what the others have done, so it can join only
where that is known of a script: each step has taken one batch, and each pass was gone through to
its end. Those who are there look at what they draw; one who joins hears from them at which batch
of which step they are, compares, and begins at its own.
"""

import time
from collections.abc import Sized
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from paceline.errors import ExchangeError, JobOver, SpecError
from paceline.session.stores import DEADLINE_SECONDS, POLL_SECONDS, unanswered

if TYPE_CHECKING:
    from paceline.session.session import Session

Position = tuple[int, int]
"""The number of a pass, and of a batch in it."""

IRREGULAR = "the job's script takes other than one batch for each step, pass after pass"


class Positions:
    """Of one worker's sharded loader."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._asking: list[int] = []
        """Newcomers to whom nobody has told where the job is."""
        self._joined_in: dict[int, int] = {}
        """Newcomer -> the pass that it came in."""
        self._last: Position = (0, -1)

    def welcome(self, rank: int) -> None:
        """It takes part from the next batch on."""
        self._asking.append(rank)

    def forget(self, rank: int) -> None:
        """It is lost, or has left: how it counts its batches is nobody's concern any more."""
        self._joined_in.pop(rank, None)
        if rank in self._asking:
            self._asking.remove(rank)

    def hand_over(self, position: Position, order: Sized) -> None:
        """A batch goes to the script, one of as many as there are in the order."""
        session, store = self._session, self._session.store
        is_over = session.is_closed_to_newcomers and not (self._asking or self._joined_in)
        if is_over or not session.identity.servers or store is None:
            return
        length = len(order)
        if position != divmod(session.step, length):
            session.close_to_newcomers(IRREGULAR)
        self._refuse_broken_pass(position, length)
        self._last = position
        for rank in self._asking:
            store.set(f"position/{rank}", "/".join(map(str, (*position, session.step))))
            self._joined_in[rank] = position[0]
        self._asking.clear()

    def _refuse_broken_pass(self, position: Position, length: int) -> None:
        number, index = self._last
        is_broken = position[0] > number and index + 1 < length
        inside = [rank for rank, came in self._joined_in.items() if came == number]
        if is_broken and self._session.options.exclusive and inside:
            names = " and ".join(f"worker{rank}" for rank in inside)
            raise ExchangeError(
                f"the script breaks off a pass over its loader, and {names} joined in the middle "
                "of it: it may count its batches otherwise. Start the job with all its workers."
            )

    def find(self, length: int) -> Position:
        """Of one who joined: the batch that it begins with, where passes are so long."""
        session = self._session
        assert session.store is not None, "there are others"
        number, index, step = map(int, self._told(session.store).split("/"))
        if (number, index) != divmod(step, length):
            fix = "start the job with all its workers."
            raise SpecError("--join", f"{IRREGULAR}.", fix)
        return divmod(session.start, length)

    def _told(self, store: Store) -> str:
        """What one who was there says, at its next batch; none comes once all have ended."""
        session, key = self._session, f"position/{self._session.rank}"
        operation, end = "learning which batch comes next", time.monotonic() + DEADLINE_SECONDS
        founders = [f"ended/worker{r}" for r in session.members if r < session.workers]
        try:
            while time.monotonic() < end:
                is_over = all(store.check([name]) for name in founders)
                if store.check([key]):
                    break
                if is_over:
                    name = session.identity.name
                    raise JobOver(f"the others have finished, and so has {name}.").told()
                time.sleep(POLL_SECONDS)
            return bytes(store.get(key)).decode()
        except (DistError, RuntimeError) as error:
            raise unanswered(error, session.identity, operation) from error
