"""What a seat remembers of the steps of its chunks: gradients, settings, and the work they make.

`closing.py` decides by it.
"""

import heapq
from collections.abc import Iterable, Sequence

from paceline.errors import ExchangeError
from paceline.protocol.actions import Part, Work
from paceline.protocol.messages import Commit, Configure, Push, Settings
from paceline.protocol.plan import Plan


class PendingGradients:
    """The gradients of one chunk and step that have come so far."""

    __slots__ = ("measured", "pushes")

    def __init__(self) -> None:
        self.pushes: dict[int, Push] = {}
        self.measured = False

    def parts(self, *, lacking: bool = False) -> tuple[Part, ...]:
        """`lacking`: somebody with whom the samples were divided is not among them."""
        weight = 1 / max(1, len(self.pushes))
        if lacking:
            weight = 1 / (sum(push.weight for push in self.pushes.values()) or 1.0)
        pushes = [self.pushes[worker] for worker in sorted(self.pushes)]
        return tuple([(push.worker, push.step, weight) for push in pushes if not push.empty])

    def absent(self) -> tuple[int, ...]:
        """Parameters that no worker had a gradient for; all of a chunk's when all are empty."""
        pushes = self.pushes.values()
        some = [push.absent for push in pushes if not push.empty] or [p.absent for p in pushes]
        return tuple(sorted(set.intersection(*map(set, some)))) if some and all(some) else ()

    @property
    def mean(self) -> bool:
        """What the workers want of this step; they must all want the same."""
        wanted = {push.mean for push in self.pushes.values()}
        if len(wanted) > 1:
            averaging = [f"worker {w}" for w, push in sorted(self.pushes.items()) if push.mean]
            raise ExchangeError(
                f"{', '.join(averaging)} changed weights or gradients outside the optimizer, and "
                "the others did not: every worker must do the same to its model."
            )
        return wanted == {True}


class Slot:
    """One chunk: its updates, its open steps, who waits for an answer."""

    def __init__(self, version: int) -> None:
        self.version = version
        """Updates done."""
        self.closed = version
        """Updates decided: those still waiting their turn too."""
        self.steps: dict[int, PendingGradients] = {}
        self.seen: dict[int, int] = {}
        """Worker -> the step of its last push: what is not above it came before."""
        self.waiting: dict[int, tuple[int, Push, bool]] = {}
        """Worker -> the version that may answer it, what it pushed, and whether that was late."""
        self.absent: tuple[int, ...] = ()
        """Of the newest mean: parameters that nobody had a gradient for."""
        self.keeper: int | None = None
        """The worker that has the newest state too, or will."""
        self.is_copied = True
        """It has; others may be answered."""

    def has_begun(self, index: int) -> bool:
        """Gradients of this step are summed, or about to be."""
        step = self.steps.get(index)
        return index < self.closed or (step is not None and step.measured)


class SettingsBook:
    """What workers have told of their optimizers' settings."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._told: dict[int, dict[int, list[Settings]]] = {}
        """Worker -> number -> settings of each group."""
        self._founders: list[Settings] | None = None
        """The newest of a worker that was there from the start."""

    def knows(self, message: Push | Commit) -> bool:
        number = message.settings
        is_known = number in self._told.get(message.worker, {})
        return is_known or number == 0 or message.generation > 0

    def of(self, message: Push | Commit) -> list[Settings] | None:
        """What a gradient, or a commit of one, goes by; None: what the plan says.

        One who joined later goes by what the others set: its own schedule began when it came."""
        if message.generation > 0:
            return self._founders
        number = message.settings
        return self._told[message.worker][number] if number else None

    def learn(self, message: Configure, slots: Iterable[Slot]) -> None:
        """Learn settings, and forget those that nothing open goes by.

        What is under way names the settings before these at the earliest: a worker changes them
        once a step, and begins a step when all that it pushed has come.
        """
        if message.generation > 0:
            return
        self._founders = message.groups
        known = self._told.setdefault(message.worker, {})
        known[message.number] = message.groups
        pushes = [
            step.pushes[message.worker]
            for slot in slots
            for step in slot.steps.values()
            if message.worker in step.pushes
        ]
        oldest = min([message.number - 1, *(push.settings for push in pushes)])
        for number in [number for number in known if number < oldest]:
            del known[number]

    def check_alike(
        self, worker: int, told: Push | Commit, wanted: list[Settings] | None, index: int
    ) -> None:
        """All gradients of a step are updated with one rate, which all workers must have set."""
        wanted, other = wanted or self._plan.groups, self.of(told) or self._plan.groups
        if other is not wanted and other != wanted:
            raise ExchangeError(
                f"worker{worker} has set its optimizer otherwise than the others in step "
                f"{index}: every worker must set the same. Decide by a number that is the same "
                "on all, such as paceline.mean(loss)."
            )


class WorkQueue:
    """Work that waits, the most urgent first: what the next forward pass needs before the rest."""

    def __init__(self, plan: Plan) -> None:
        self._urgency: Sequence[int] = [chunk.first_use for chunk in plan.layout.chunks]
        self._waiting: list[tuple[int, int, Work]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: Work) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (self._urgency[work.chunk], self._count, work))

    def take(self) -> Work | None:
        return heapq.heappop(self._waiting)[2] if self._waiting else None

    def reorder(self, first_use: Sequence[int]) -> None:
        self._urgency = first_use
        self._waiting = [(first_use[work.chunk], count, work) for _, count, work in self._waiting]
        heapq.heapify(self._waiting)
