"""Second homes: how the chunks of a lost server go on at the servers that are left.

Where `Rules.second_homes` holds, a worker keeps each gradient until it is answered, and what only a
server had, the optimizer's state of a chunk, is with one worker too:

    seat      has updated a chunk: it sends the state to a worker (`Copy`), and behind it the answer
    worker    has weights and state of one update: it says so (`Copied`). Now others are answered

So nobody goes on with weights whose state a single loss could take away. When a server is lost, its
chunks are dealt to those that are left, by all members alike:

    worker    tells the new homes what it has of each chunk (`Orphans`), and sends once more those
              of its gradients that were not answered
    seat      has heard so from every worker: it asks one that has the newest weights, with their
              state, for them (`Rescue`), and goes on from there when they come (`Handed`)

A step that was interrupted is thus made again from the same gradients, and comes to the same bits.
Workers that are lost or admitted meanwhile may leave a gap that nobody can fill: whoever finds one
stops the job.

A worker that serves takes gradients of its own with it. Each of them that stays in its process goes
to the seat as well that would take the chunk in (`Spare`), and that seat says that it has all of a
step (`Gathered`) only when it has these. So a step that is sealed can be made without the lost one,
from its gradients; of one that is not sealed they count nowhere. From which step on that is so must
be decided (`losses.py`) before chunks are taken in.
"""

from collections.abc import Callable, Collection, Iterator

import msgspec

from paceline.errors import ExchangeError
from paceline.protocol.messages import Handed, Holding, Orphans, Push
from paceline.protocol.plan import Plan, deal_without


class Homes:
    """Who serves which chunk, after all losses of servers that are known here."""

    def __init__(self, plan: Plan) -> None:
        self.owners = plan.owners
        self.lost: tuple[int, ...] = ()
        """Seats, in the order in which they were lost: chunks are dealt anew one by one."""
        self._plan = plan
        self._find_heirs()

    def _find_heirs(self) -> None:
        """Who would take in what a worker serves, if that one were lost next."""
        self.heirs: dict[int, int] = {}
        """Chunk -> seat; of chunks that workers serve."""
        seats = self._plan.seats
        inside = [seat for seat in set(self.owners) if seats[seat].worker is not None]
        if not self._plan.rules.second_homes or len(self.lost) + 1 >= len(seats):
            return
        plan = msgspec.structs.replace(self._plan, owners=self.owners)
        for seat in inside:
            dealt = deal_without(plan, (*self.lost, seat))
            mine = [chunk for chunk, owner in enumerate(self.owners) if owner == seat]
            self.heirs |= {chunk: dealt[chunk] for chunk in mine}

    @property
    def needed(self) -> frozenset[int]:
        """Seats that must have all of a step before it may close."""
        return frozenset(self.owners) | frozenset(self.heirs.values())

    @property
    def arbiter(self) -> int:
        """The seat that chooses quorums and admits workers: one that serves a chunk."""
        return self.owners[0] if self.owners else 0

    @property
    def names(self) -> str:
        return " and ".join(self._plan.seats[seat].member for seat in self.lost)

    def lose(self, seat: int) -> frozenset[int]:
        """Deal its chunks anew; which they are."""
        self.lost = (*self.lost, seat)
        if len(self.lost) == len(self._plan.seats):
            raise ExchangeError(f"{self.names} was lost, and no server is left.")
        before = self.owners
        plan = msgspec.structs.replace(self._plan, owners=before)
        self.owners = deal_without(plan, self.lost)
        self._find_heirs()
        return frozenset(chunk for chunk, owner in enumerate(before) if owner == seat)


class WorkerHomes(Homes):
    """What one worker keeps for servers that may be lost."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._copies: dict[int, set[int]] = {}
        """Chunk -> the versions whose state is here: that of the weights at hand, and one whose
        weights are on their way."""
        self._means: set[int] = set()
        """Chunks whose newest answer was a mean of gradients, which has no state."""
        self._absent: dict[int, tuple[int, ...]] = {}

    def copy(self, chunk: int, version: int) -> None:
        self._copies.setdefault(chunk, set()).add(version)

    def answered(self, chunk: int, version: int, absent: tuple[int, ...], *, mean: bool) -> None:
        """Weights have come, or a mean; older states are of no use any more."""
        self._copies[chunk] = {v for v in self._copies.get(chunk, ()) if v >= version}
        self._absent[chunk] = absent
        if mean:
            self._means.add(chunk)
        else:
            self._means.discard(chunk)

    def has_state(self, chunk: int, version: int) -> bool:
        return version in self._copies.get(chunk, ())

    def holding(self, chunk: int, version: int, pushed: int) -> Holding:
        kept, mean = self.has_state(chunk, version), chunk in self._means
        return Holding(chunk, version, kept, mean, pushed)

    def handed(self, worker: int, chunk: int, version: int) -> Handed:
        bare, absent = chunk in self._means, self._absent.get(chunk, ())
        return Handed(worker, chunk, version, absent, bare)


class SeatHomes(Homes):
    """What one seat knows of chunks that it is to take in."""

    def __init__(self, plan: Plan, seat: int) -> None:
        super().__init__(plan)
        self._early: list[Push] = []
        """Gradients of chunks that are not here yet."""
        self._seat = seat
        self._reports: dict[int, dict[int, Holding]] = {}
        """Chunk to take in -> worker -> what it has of it."""
        self._asked: dict[int, int] = {}
        """Chunk -> the version that was asked for."""
        self._awaited: set[tuple[int, int]] = set()
        """Chunk and worker: a gradient that had gone to the lost server and is sent once more."""
        self._spares: dict[int, Push] = {}
        """Chunk that another seat serves -> the newest gradient of the worker there."""

    @property
    def is_short(self) -> bool:
        """Some chunk is not here yet."""
        return bool(self._reports)

    @property
    def is_open(self) -> bool:
        """A worker lost now would take something with it that nobody else has."""
        return bool(self._reports or self._awaited)

    def takes_in(self, chunk: int) -> bool:
        return chunk in self._reports

    def silent(self, chunk: int, present: Collection[int]) -> list[int]:
        """Workers that have not said what they have of a chunk."""
        return sorted(set(present) - self._reports[chunk].keys())

    def hear(self, orphans: Orphans) -> bool:
        """A worker has lost servers; whether that is news."""
        common = min(len(orphans.lost), len(self.lost))
        if orphans.lost[:common] != self.lost[:common]:
            raise ExchangeError("two servers were lost at once, and workers differ in which first.")
        news = orphans.lost[common:]
        for seat in news:
            for chunk in self.lose(seat):
                if self.owners[chunk] == self._seat:
                    self._reports[chunk] = {}
        for holding in orphans.holdings:
            if holding.chunk in self._reports and holding.chunk not in self._asked:
                self._reports[holding.chunk][orphans.worker] = holding
                if holding.pushed >= 0:
                    self._awaited.add((holding.chunk, orphans.worker))
        return bool(news)

    def put_spare(self, push: Push) -> tuple[bool, Push | None]:
        """Whether it is to be kept, and the one whose place it takes."""
        before = self._spares.get(push.chunk)
        if self.heirs.get(push.chunk) != self._seat or (before and before.step >= push.step):
            return False, None
        self._spares[push.chunk] = push
        return True, before

    def due_spares(self, crew: Collection[int]) -> list[int]:
        """Chunks that would come here, of workers in the crew: so many gradients of a step."""
        seats, owners = self._plan.seats, self.owners
        mine = [chunk for chunk, heir in self.heirs.items() if heir == self._seat]
        return [chunk for chunk in mine if seats[owners[chunk]].worker in crew]

    def has_spare(self, chunk: int, step: int, is_settled: Callable[[Push], bool]) -> bool:
        spare = self._spares.get(chunk)
        return spare is not None and spare.step == step and is_settled(spare)

    def take_spare(self, chunk: int) -> Push | None:
        return self._spares.pop(chunk, None)

    def drop_spares(self) -> list[Push]:
        """Those that other seats are for now."""
        kept = self._reports.keys() | {c for c, heir in self.heirs.items() if heir == self._seat}
        return [self._spares.pop(chunk) for chunk in self._spares.keys() - kept]

    def pushed(self, push: Push) -> None:
        self._awaited.discard((push.chunk, push.worker))

    def to_ask(self, present: Collection[int]) -> Iterator[tuple[int, int, int]]:
        """Chunk, worker, and the version it has: of chunks that all have told of, once."""
        for chunk, told in self._reports.items():
            if chunk not in self._asked and present and told.keys() >= set(present):
                worker = self._choose(chunk, {w: told[w] for w in sorted(present)})
                self._asked[chunk] = version = told[worker].version
                yield chunk, worker, version

    def _choose(self, chunk: int, told: dict[int, Holding]) -> int:
        newest = max(holding.version for holding in told.values())
        having = {worker: one for worker, one in told.items() if one.version == newest}
        if all(one.mean for one in having.values()):
            return min(having)
        kept = [worker for worker, one in having.items() if one.kept]
        if not kept:
            raise ExchangeError(
                f"{self.names} was lost, and nobody else had the optimizer's state of chunk "
                f"{chunk}: it was before its second update, a worker was lost just before, or one "
                "that had done its last step has left."
            )
        return min(kept)

    def adopts(self, handed: Handed) -> bool:
        """Whether this is what was asked for; the chunk is here then."""
        if self._asked.get(handed.chunk) != handed.version:
            return False  # came before
        del self._asked[handed.chunk], self._reports[handed.chunk]
        return True

    def put_early(self, push: Push) -> bool:
        """A gradient of a chunk that is not here yet; False if it came before."""
        if push in self._early:
            return False
        self._early.append(push)
        return True

    def take_early(self, chunk: int) -> list[Push]:
        mine = [push for push in self._early if push.chunk == chunk]
        self._early = [push for push in self._early if push.chunk != chunk]
        return mine
