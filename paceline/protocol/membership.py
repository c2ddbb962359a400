"""Who is in the job, from which step to which; every worker that joins has a new *generation*."""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Stay:
    """One worker's time in the job."""

    generation: int
    """In which it was admitted."""

    since: int
    """The first step that waits for it."""

    until: int | None = None
    """The first that does not any more, once it has finished."""


class Roster:
    """The workers and the steps each is waited for in, as one seat knows them."""

    def __init__(self, workers: int, step: int = 0) -> None:
        """Workers 0 to `workers` - 1 are there from `step` on."""
        self.generation = 0
        self._stays = {worker: Stay(0, step) for worker in range(workers)}
        self._lost: set[int] = set()
        self._settle()

    @property
    def present(self) -> frozenset[int]:
        """Those that have neither finished nor were lost."""
        return self._present

    def admits(self, worker: int, generation: int) -> bool:
        """A message of this worker, admitted in this generation, counts."""
        stay = self._stays.get(worker)
        return stay is not None and stay.generation == generation

    def knows(self, worker: int) -> bool:
        """It was admitted, and perhaps lost since."""
        return worker in self._stays or worker in self._lost

    def has_ended(self, worker: int) -> bool:
        """It has finished: its connection may close."""
        stay = self._stays.get(worker)
        return stay is not None and stay.until is not None

    def expected(self, step: int) -> frozenset[int]:
        """Whose gradients make this step."""
        if step >= self._settled_from:
            return self._present
        return frozenset(
            worker
            for worker, stay in self._stays.items()
            if stay.since <= step and (stay.until is None or step < stay.until)
        )

    def ended(self, step: int) -> dict[int, int]:
        """Those that finished before this step, and how many they took part in."""
        until = {worker: stay.until for worker, stay in self._stays.items()}
        return {w: steps for w, steps in until.items() if steps is not None and steps <= step}

    def join(self, worker: int, generation: int, step: int) -> None:
        """Wait for it from `step` on."""
        self._stays[worker] = Stay(generation, step)
        self.generation = max(self.generation, generation)
        self._settle()

    def leave(self, worker: int, step: int) -> None:
        self._stays[worker].until = step
        self._settle()

    def lose(self, worker: int) -> None:
        self._lost.add(worker)
        if self._stays.pop(worker, None) is not None:
            self._settle()

    def _settle(self) -> None:
        stays = self._stays.values()
        self._present = frozenset(w for w, stay in self._stays.items() if stay.until is None)
        self._settled_from = max((max(s.since, s.until or 0) for s in stays), default=0)
        """From this step on all are waited for who are present."""
        self.first_end = min((s.until for s in stays if s.until is not None), default=math.inf)
        """The first step that somebody who finished takes no part in."""
