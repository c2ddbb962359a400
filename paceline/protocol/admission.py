"""How a worker joins a job that runs: the arbiter's part.

A step that some chunks closed without the newcomer and others with it would not be one step. So the
arbiter, the seat that serves chunk 0, names a step that no seat can have closed, and does not close
the steps that lead there until every seat has heard of it.

Which step is that? A worker begins a step when all chunks have answered the one before, so no chunk
is more than `staleness + 1` steps ahead of any other. Held below `limit`, the arbiter holds all
others to `limit + staleness + 1`: there the newcomer starts.
"""

import math
from collections.abc import Collection

from paceline.protocol.messages import Admitted
from paceline.protocol.plan import Rules

LEEWAY_STEPS = 1
"""The arbiter closes so many more before it waits: time for the news to travel."""


class Admission:
    """Workers that were admitted and are not yet known to every seat."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.limit = math.inf
        """Steps from this one on stay open for now."""
        self._limits: dict[int, tuple[int, int]] = {}
        """Worker -> its generation, and the step that is not closed before all know of it."""
        self._admitted: dict[int, Admitted] = {}
        """What was answered, should one ask again."""

    @property
    def pending(self) -> list[int]:
        return sorted(self._limits)

    def admit(
        self, worker: int, generation: int, closed: int, present: Collection[int]
    ) -> Admitted:
        """`closed`: how many steps the arbiter has closed of the chunk that is furthest; where
        steps are everyone's own, how many the worker has made that is furthest."""
        if worker not in self._admitted:
            crew = tuple(sorted({*present, worker}))
            self._admitted[worker] = self._decide(worker, generation + 1, closed, crew)
        return self._admitted[worker]

    def _decide(self, worker: int, generation: int, closed: int, crew: tuple[int, ...]) -> Admitted:
        if self._rules.mode in ("async", "quorum"):  # no step waits for one by name
            return Admitted(worker, generation, closed, crew)
        limit = closed + LEEWAY_STEPS
        pending = [self._admitted[other] for other in self._limits]
        self._limits[worker] = generation, limit
        self.limit = min(self.limit, limit)
        others = tuple((other.worker, other.generation, other.step) for other in pending)
        return Admitted(worker, generation, limit + self._rules.staleness + 1, crew, others)

    def settle(self, worker: int, generation: int) -> None:
        """Every seat has welcomed it."""
        if self._limits.get(worker, (-1, 0))[0] == generation:
            self._lift(worker)

    def lose(self, worker: int) -> None:
        self._lift(worker)
        self._admitted.pop(worker, None)

    def _lift(self, worker: int) -> None:
        self._limits.pop(worker, None)
        self.limit = min((limit for _, limit in self._limits.values()), default=math.inf)
