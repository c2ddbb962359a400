"""How a lost worker leaves a job that goes on: in every chunk from the same step on.

Where `Rules.whole` holds no chunk is updated before all gradients of its step are at all seats, so
that a worker counts in all chunks of a step or in none:

    seat      tells the workers of each step whose gradients it has all (`Gathered`)
    worker    has heard so from every seat: it tells them all (`Sealed`). Now the step may close

A seat that loses a worker takes nothing from it any more and tells the others (`Doubted`), who pass
it on to the seats that may not have noticed (`Doubt`), and from then on seal no step that it is in.
When every seat has doubted, each worker tells the arbiter how many steps it knows to be sealed
(`Vow`); when all have, the arbiter names the step from which on the lost worker counts nowhere
(`Cut`): the first that nobody knows to be sealed, and that nobody can have sealed since. A worker
lost meanwhile is doubted too: what it had sealed the seats know, who have heard its last words.

A single seat knows all of this by itself and sends none of it but `Cut`.
"""

from collections.abc import Collection

from paceline.errors import ExchangeError
from paceline.protocol.messages import Cut, Doubted, Gathered, Vow
from paceline.protocol.plan import Plan


class SeatLosses:
    """What one seat knows of whole steps, and, as arbiter, of who has vowed what."""

    def __init__(self, plan: Plan, seat: int, step: int, needed: Collection[int]) -> None:
        """Steps before `step` are past. `needed`: seats that must have all of a step."""
        self.serves = seat in needed
        self.alone = set(needed) == {seat}
        self.gathered = step
        """Of all steps before this one all gradients are here."""
        self.sealed = step
        """All steps before this one may close."""
        self.doubted: set[int] = set()
        """Lost, and it is not decided from which step on."""
        self._seat = seat
        self._vows: dict[int, tuple[frozenset[int], int]] = {}
        """Worker -> with whom it seals no more, and how many steps it knew to be sealed."""
        self._cuts: list[Cut] = []
        self._cut_steps = plan.rules.cut_steps

    def seal(self, steps: int) -> None:
        self.sealed = max(self.sealed, steps)
        self.gathered = max(self.gathered, steps)

    def doubt(self) -> Doubted:
        return Doubted(self._seat, tuple(sorted(self.doubted)), self.sealed)

    def vow(self, vow: Vow) -> None:
        lost, sealed = self._vows.get(vow.worker, (frozenset[int](), 0))
        self._vows[vow.worker] = lost | set(vow.lost), max(sealed, vow.sealed)

    def decide(self, present: Collection[int]) -> Cut | None:
        """As arbiter, or alone; None while somebody has not vowed, or nobody is there to go on."""
        if not self.doubted or not (present or self.alone):
            return None
        steps = self.sealed
        for worker in () if self.alone else present:
            lost, sealed = self._vows.get(worker, (frozenset[int](), 0))
            if not self.doubted <= lost:
                return None
            steps = max(steps, sealed)
        return Cut(tuple(sorted(self.doubted)), steps)

    def lacks(self, step: int) -> bool:
        """Whether samples of this step were divided with somebody who does not count in it."""
        return any(cut.step <= step < cut.step + self._cut_steps for cut in self._cuts)

    def decided(self, workers: Collection[int]) -> list[Cut]:
        """What was decided of some of these."""
        return [cut for cut in self._cuts if set(workers) & set(cut.lost)]

    def leave(self, step: int) -> None:
        """Somebody takes no part in this step and later ones: what is gathered of these must be
        said anew, as of fewer."""
        self.gathered = max(self.sealed, min(self.gathered, step))

    def move(self, needed: Collection[int]) -> None:
        """A seat was lost: what is gathered here must be said anew."""
        self.serves = self._seat in needed
        self.gathered = self.sealed

    def cut(self, cut: Cut) -> None:
        self._cuts.append(cut)
        self.doubted.difference_update(cut.lost)
        self.seal(cut.step)
        self.gathered = self.sealed  # what was gathered beyond was of others


class WorkerLosses:
    """What one worker knows of whole steps."""

    def __init__(self, worker: int, needed: Collection[int]) -> None:
        self.sealed = 0
        """All steps before this one are known to be sealed."""
        self.alone = len(needed) <= 1
        """One seat finds all out by itself."""
        self._worker, self._seats = worker, frozenset(needed)
        self._gathered: dict[int, dict[int, tuple[int, frozenset[int]]]] = {}
        """Step -> seat -> after how many moves of chunks, and whose gradients it has."""
        self._moves = 0
        self._lost: set[int] = set()
        self._decided: set[int] = set()
        self._doubts: dict[int, set[int]] = {seat: set() for seat in self._seats}
        self._vowed: frozenset[int] = frozenset()

    def gather(self, message: Gathered) -> bool:
        """A seat has all gradients of a step; whether all have now, of the same workers."""
        if message.step < self.sealed:
            return False
        seats = self._gathered.setdefault(message.step, {})
        crew = frozenset(message.crew)
        moves, known = seats.get(message.seat, (message.moves, crew))
        if moves == message.moves:
            # Over time it can only become smaller, so an older message does no harm.
            seats[message.seat] = moves, known & crew
        elif moves < message.moves:
            seats[message.seat] = message.moves, crew
        return self._seal_if_all_have(message.step)

    def _seal_if_all_have(self, step: int) -> bool:
        told = self._gathered[step]
        crews = {told[seat] for seat in self._seats if seat in told}
        if not self._seats <= told.keys() or len(crews) > 1:
            return False
        moves, crew = crews.pop()
        if moves != self._moves or crew & self._lost:
            return False
        self.seal(step + 1)
        return True

    def move(self, needed: Collection[int], moves: int) -> list[int]:
        """A seat was lost, the last of so many; steps that are sealed now."""
        self._seats, self._moves = frozenset(needed), moves
        for seat in self._seats:
            self._doubts.setdefault(seat, set())
        self._doubts = {seat: self._doubts[seat] for seat in self._seats}
        return [step for step in sorted(self._gathered) if self._seal_if_all_have(step)]

    @property
    def undecided(self) -> frozenset[int]:
        """Workers that are lost, and nobody has said from which step on."""
        return frozenset(self._lost - self._decided)

    def seal(self, steps: int) -> None:
        self.sealed = max(self.sealed, steps)
        for step in [step for step in self._gathered if step < self.sealed]:
            del self._gathered[step]

    def doubt(self, message: Doubted) -> tuple[int, ...]:
        """A seat has lost workers; those that are news."""
        if self._worker in message.workers:
            raise ExchangeError(
                f"worker{self._worker} lost a connection, and the others go on without it."
            )
        news = tuple(sorted(set(message.workers) - self._lost))
        self._lost.update(message.workers)
        self._doubts.setdefault(message.seat, set()).update(message.workers)
        self.seal(message.sealed)
        return news

    def vow(self, generation: int) -> Vow | None:
        """What the arbiter must know, once every seat has doubted; told once."""
        undecided = self.undecided
        known = all(undecided <= doubts for doubts in self._doubts.values())
        if not known or undecided <= self._vowed:
            return None
        self._vowed = undecided
        return Vow(self._worker, tuple(sorted(undecided)), self.sealed, generation)

    def cut(self, cut: Cut) -> Collection[int]:
        """Those of whom it is decided now."""
        news = set(cut.lost) - self._decided
        self._decided |= news
        self._lost |= news
        self.seal(cut.step)
        return news
