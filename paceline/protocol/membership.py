"""Who is in the job, from which step to which; every worker that joins has a new *generation*."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.protocol.actions import CrewChange


@dataclass(slots=True)
class Stay:
    """One worker's time in the job."""

    generation: int
    """In which it was admitted."""

    since: int
    """The first step that waits for it."""

    until: int | None = None
    """The first that does not any more, once it has finished or was cut out."""

    lost: bool = False
    is_out: bool = False
    """It had joined, and was sent away, or lost before it brought anything."""

    @property
    def counts(self) -> bool:
        """Its end says where the job's may be: one who joined may leave while others go on."""
        return self.generation == 0 and not self.lost


class Roster:
    """The workers and the steps each is waited for in, as one seat knows them."""

    def __init__(self, workers: int, step: int = 0) -> None:
        """Workers 0 to `workers` - 1 are there from `step` on."""
        self.generation = 0
        self._stays = {worker: Stay(0, step) for worker in range(workers)}
        self._lost: set[int] = set()
        self._doubted: set[int] = set()
        self._departed: set[int] = set()
        self._left: set[int] = set()
        """First steps that somebody who left takes no part in."""
        self._settle()

    @property
    def present(self) -> frozenset[int]:
        """Those that have neither finished nor were lost."""
        return self._present

    @property
    def alive(self) -> frozenset[int]:
        """Those that are there, whether they have finished or not."""
        return frozenset(self._stays) - self._lost - self._departed

    def admits(self, worker: int, generation: int) -> bool:
        """A message of this worker, admitted in this generation, counts."""
        stay = self._stays.get(worker)
        is_there = stay is not None and not stay.is_out and worker not in self._lost
        return is_there and self._stays[worker].generation == generation

    def knows(self, worker: int) -> bool:
        """It was admitted, and perhaps lost since."""
        return worker in self._stays or worker in self._lost

    def has_ended(self, worker: int) -> bool:
        """It has finished: its connection may close."""
        stay = self._stays.get(worker)
        return stay is not None and stay.until is not None and not stay.lost

    def has_joined(self, worker: int) -> bool:
        """It was not there from the start."""
        stay = self._stays.get(worker)
        return stay is not None and stay.generation > 0

    def end(self, *, exclusive: bool) -> float:
        """The first step that the job does not take, once that is known: all take the same steps,
        or everyone its own, and all who were there from the start have finished."""
        if exclusive:
            return self.first_end
        stays = [s for s in self._stays.values() if s.generation == 0 and not s.lost]
        return max((math.inf if s.until is None else s.until for s in stays), default=math.inf)

    def since(self, worker: int) -> int:
        """The first step that waited for it."""
        stay = self._stays.get(worker)
        return 0 if stay is None else stay.since

    def until(self, worker: int) -> float:
        """The first step that does not wait for it any more, once that is known."""
        stay = self._stays.get(worker)
        return math.inf if stay is None or stay.until is None else stay.until

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
        until = {worker: stay.until for worker, stay in self._stays.items() if stay.counts}
        return {w: steps for w, steps in until.items() if steps is not None and steps <= step}

    def lacks(self, step: int, cut_steps: int) -> bool:
        """Its samples were divided with one who has left, when others had not heard of that."""
        return any(since <= step < since + cut_steps for since in self._left)

    def join(self, worker: int, generation: int, step: int) -> None:
        """Wait for it from `step` on."""
        self._stays[worker] = Stay(generation, step)
        self.generation = max(self.generation, generation)
        self._settle()

    def leave(self, worker: int, step: int) -> None:
        self._left.add(step)
        self._stays[worker].until = step
        self._settle()

    def depart(self, worker: int) -> None:
        """It has finished, and its connection is closed: it can be asked nothing any more."""
        self._departed.add(worker)

    def withdraw(self, worker: int) -> None:
        """It had joined, and is gone before it brought a gradient."""
        since = self._stays[worker].since
        self._left.add(since)
        self.send_away(worker, since)

    def send_away(self, worker: int, step: int) -> None:
        """It had joined: no step from this one on waits for it, and nothing comes from it."""
        self._stays[worker].until, self._stays[worker].is_out = step, True
        self._settle()

    def lose(self, worker: int) -> None:
        self._lost.add(worker)
        if self._stays.pop(worker, None) is not None:
            self._settle()

    def is_lost(self, worker: int) -> bool:
        """Doubted too."""
        return worker in self._lost

    def doubt(self, worker: int) -> None:
        """It is lost, and until it is cut out its gradients stay expected."""
        self._lost.add(worker)
        if worker in self._stays:
            self._doubted.add(worker)
            self._settle()

    def cut(self, worker: int, step: int) -> None:
        """Of one in doubt: no step from this one on waits for it."""
        self._lost.add(worker)
        self._doubted.discard(worker)
        if worker in self._stays:
            self._stays[worker].until, self._stays[worker].lost = step, True
            self._settle()

    def _settle(self) -> None:
        stays = self._stays.values()
        self._present = frozenset(
            w for w, s in self._stays.items() if s.until is None and w not in self._doubted
        )
        until = [max(s.since, s.until or 0) for s in stays]
        self._settled_from = math.inf if self._doubted else max(until, default=0)
        """From this step on all are waited for who are present."""
        ends = [s.until for s in stays if s.until is not None and s.counts]
        self.first_end = min(ends, default=math.inf)
        """The first step that somebody who finished takes no part in."""


class CrewBook:
    """Who takes a worker's next step: what it was told of others, until that is due."""

    def __init__(self, crew: Iterable[int]) -> None:
        self.crew = frozenset(crew)
        self._changes: list[CrewChange] = []

    @property
    def leader(self) -> int:
        """The one that speaks for all: worker 0 while it is there."""
        return min(self.crew, default=0)

    def hear(self, change: CrewChange) -> None:
        self._changes.append(change)

    def begin(self, step: float) -> Iterator[CrewChange]:
        """Before a step: every change that holds by then, and `crew` as it is after it."""
        due = [change for change in self._changes if change.since <= step]
        self._changes = [change for change in self._changes if change.since > step]
        for change in due:
            self.crew = self.crew.union(change.come).difference(change.lost, change.left)
            yield change
