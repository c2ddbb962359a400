"""The server's side of an exchange: when a chunk is updated, from whose gradients, and who is told.

`handle(message) -> actions`, with no clock, socket or tensor. Chunks are independent of each other,
so messages may come in any order. One rule covers the modes:

  mode      a step closes when                a worker is answered when the chunk has seen
  sync      every worker has pushed it        all steps up to its own
  bounded   every worker has pushed it        all steps up to its own, less `staleness`
  quorum    the chosen workers have pushed    its own step, counted or late
  async     at each push                      its own push

In `bounded` the update of a step is still the mean over all workers: `staleness = 0` is `sync`.
In `quorum` the arbiter (seat 0) chooses the first k workers to have made a whole step.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from paceline.errors import ExchangeError
from paceline.protocol.membership import Membership
from paceline.protocol.messages import (
    Answer,
    Chosen,
    Commit,
    Declare,
    Join,
    Leave,
    Message,
    Pull,
    Push,
)

Mode = Literal["sync", "async", "bounded", "quorum"]


class Keep(msgspec.Struct, frozen=True, gc=False):
    """Action: hold this worker's gradient until the step closes."""

    push: Push


class Drop(msgspec.Struct, frozen=True, gc=False):
    """Action: forget this worker's gradient; its step has closed. It was counted as late."""

    push: Push


class Update(msgspec.Struct, frozen=True):
    """Action: apply the mean of the gradients kept for this step, and forget them."""

    chunk: int
    step: int
    parts: tuple[tuple[int, float], ...]
    """Worker and weight, in the order of workers, so that sums are the same in every run.

    Workers without a gradient are left out, and count as zero; none at all means no update.
    """

    absent: tuple[int, ...] = ()
    """Parameters in the chunk that got no gradient from anybody, and so are not updated."""

    mean: bool = False
    """The mean takes the place of the weights, which the workers hold."""


class Measure(msgspec.Struct, frozen=True):
    """Action: sum the gradients kept for this step and tell every worker their norm."""

    chunk: int
    step: int
    parts: tuple[tuple[int, float], ...]


class Announce(msgspec.Struct, frozen=True):
    """Action: tell every worker who was chosen."""

    chosen: Chosen


Action = Keep | Drop | Update | Measure | Announce | Answer


class _Step:
    """The gradients of one chunk and step that have come so far."""

    def __init__(self) -> None:
        self.pushes: dict[int, Push] = {}
        self.measured = False

    def parts(self) -> tuple[tuple[int, float], ...]:
        weight = 1 / len(self.pushes)
        return tuple(
            (worker, weight) for worker in sorted(self.pushes) if not self.pushes[worker].empty
        )

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

    def absent(self) -> tuple[int, ...]:
        """Parameters that no worker had a gradient for; all of a chunk's when all are empty."""
        pushes = self.pushes.values()
        some = [push for push in pushes if not push.empty] or list(pushes)
        return tuple(sorted(set.intersection(*(set(push.absent) for push in some))))


class _Slot:
    """One chunk: how many updates it has seen, its open steps, who waits for an answer."""

    def __init__(self) -> None:
        self.version = 0
        self.steps: dict[int, _Step] = {}
        self.waiting: dict[int, int] = {}
        """Worker -> the version that may answer it."""
        self.late: set[int] = set()
        """Of those, whose gradient was dropped."""
        self.absent: tuple[int, ...] = ()
        """Of the newest mean: parameters that nobody had a gradient for."""


class ServerMachine:
    """One server's view of the chunks it holds."""

    def __init__(
        self,
        chunks: Iterable[int],
        members: Membership,
        mode: Mode = "sync",
        staleness: int = 0,
        quorum: int = 0,
    ) -> None:
        self.members = members
        self.staleness: dict[int, Counter[int]] = {}
        """Worker -> updates its weights lacked when its gradient came -> how often."""
        self.late: Counter[int] = Counter()
        """Worker -> gradients that came after their step had closed."""
        self._mode = mode
        self._staleness = staleness if mode == "bounded" else 0
        self._quorum = quorum if mode == "quorum" else 0
        self._slots = {chunk: _Slot() for chunk in chunks}
        self._commits: dict[int, set[int]] = {}
        self._declared: dict[int, set[int]] = {}
        self._chosen: dict[int, frozenset[int]] = {}
        self._ended: dict[int, int] = {}
        """Worker that has left -> how many steps it took."""

    def version(self, chunk: int) -> int:
        return self._slots[chunk].version

    def missing(self, chunk: int) -> list[int]:
        """Workers whose gradient the open step of a chunk waits for."""
        slot = self._slots[chunk]
        step = slot.steps.get(slot.version)
        return sorted(self.members.workers - set(step.pushes if step else ()))

    def handle(self, message: Message) -> list[Action]:
        match message:
            case Push():
                return self._push(message)
            case Pull():
                slot = self._slot(message.chunk)
                return [Answer(message.worker, message.chunk, slot.version)]
            case Commit():
                # A worker commits a step only when all before it are closed everywhere.
                self._commits = {s: who for s, who in self._commits.items() if s >= message.step}
                self._commits.setdefault(message.step, set()).add(message.worker)
                return self._close_all()
            case Declare():
                self._declared.setdefault(message.step, set()).add(message.worker)
                return self._choose()
            case Chosen():
                return self._take_choice(message)
            case Join():
                self.members = self.members.joined(message.worker)
                return []
            case Leave():
                self.members = self.members.left(message.worker)
                self._ended[message.worker] = message.steps
                for slot in self._slots.values():
                    slot.waiting.pop(message.worker, None)
                    for step in slot.steps.values():  # begun by others, and not to be closed
                        for push in step.pushes.values():
                            self._require_all(push)
                return [*self._choose(), *self._close_all()]
        raise ExchangeError(f"a server cannot handle {message!r}.")

    def _slot(self, chunk: int) -> _Slot:
        try:
            return self._slots[chunk]
        except KeyError:
            raise ExchangeError(f"chunk {chunk} is not held by this server.") from None

    def _push(self, push: Push) -> list[Action]:
        slot = self._slot(push.chunk)
        if push.worker not in self.members.workers:
            self.late[push.worker] += 1  # sent before it was lost, and overtaken by that news
            return [Drop(push)]
        self._require_all(push)
        self._count_staleness(slot, push)
        index = slot.version if self._mode == "async" else push.step
        slot.waiting[push.worker] = index + 1 - self._staleness
        if self._is_late(slot, push, index):
            return [self._drop(slot, push), *self._close(push.chunk, slot)]
        step = slot.steps.setdefault(index, _Step())
        if push.worker in step.pushes:
            raise ExchangeError(
                f"worker {push.worker} pushed chunk {push.chunk} twice in step {index}."
            )
        step.pushes[push.worker] = push
        return [Keep(push), *self._close(push.chunk, slot)]

    def _require_all(self, push: Push) -> None:
        """In `sync` a step is all workers' work: one that has ended before it is missed."""
        early = [w for w, steps in self._ended.items() if steps <= push.step]
        if early and self._mode == "sync":
            told = ", ".join(f"worker{w} ended after {self._ended[w]} steps" for w in early)
            raise ExchangeError(
                f"{told}, and worker{push.worker} is at step {push.step + 1}: every worker must "
                "take the same number of steps. Take batches from paceline.shard(loader), and skip "
                "or stop on all workers alike."
            )

    def _is_late(self, slot: _Slot, push: Push, index: int) -> bool:
        chosen = self._chosen.get(index)
        return index < slot.version or (chosen is not None and push.worker not in chosen)

    def _drop(self, slot: _Slot, push: Push) -> Drop:
        self.late[push.worker] += 1
        slot.late.add(push.worker)
        return Drop(push)

    def _choose(self) -> list[Action]:
        """As arbiter: close the choice of every step that enough workers have made."""
        actions: list[Action] = []
        enough = min(self._quorum, max(1, len(self.members.workers)))
        for step in [s for s, who in self._declared.items() if len(who) >= enough]:
            chosen = Chosen(step, tuple(sorted(self._declared.pop(step))))
            if step not in self._chosen and step >= self._oldest():
                actions += [Announce(chosen), *self._take_choice(chosen)]
        return actions

    def _take_choice(self, choice: Chosen) -> list[Action]:
        """Drop what came from others for this step; heard from several workers, done once."""
        if choice.step in self._chosen or choice.step < self._oldest():
            return []
        chosen = self._chosen[choice.step] = frozenset(choice.workers)
        actions: list[Action] = []
        for slot in self._slots.values():
            step = slot.steps.get(choice.step)
            for worker in sorted(step.pushes.keys() - chosen) if step else ():
                assert step is not None
                actions.append(self._drop(slot, step.pushes.pop(worker)))
        return [*actions, *self._close_all()]

    def _oldest(self) -> int:
        return min((slot.version for slot in self._slots.values()), default=0)

    def _count_staleness(self, slot: _Slot, push: Push) -> None:
        newest = push.step if self._mode in ("sync", "bounded") else slot.version
        counts = self.staleness.setdefault(push.worker, Counter())
        counts[newest - push.version] += 1

    def _close_all(self) -> list[Action]:
        return [a for chunk, slot in self._slots.items() for a in self._close(chunk, slot)]

    def _close(self, chunk: int, slot: _Slot) -> list[Action]:
        """Close every step that is complete, in order, then answer who may be answered."""
        actions: list[Action] = []
        while (step := slot.steps.get(slot.version)) and self._complete(slot.version, step):
            parts = step.parts()
            if not self._allowed(slot.version, step):
                if not step.measured:
                    step.measured = True
                    actions.append(Measure(chunk, slot.version, parts))
                break
            slot.absent = step.absent() if step.mean else ()
            actions.append(Update(chunk, slot.version, parts, step.absent(), step.mean))
            del slot.steps[slot.version]
            slot.version += 1
            if self._chosen:
                self._chosen.pop(self._oldest() - 1, None)
        served = [worker for worker, needed in slot.waiting.items() if needed <= slot.version]
        for worker in served:
            del slot.waiting[worker]
            late = worker in slot.late
            actions.append(Answer(worker, chunk, slot.version, late=late, absent=slot.absent))
            slot.late.discard(worker)
        return actions

    def _complete(self, index: int, step: _Step) -> bool:
        needed = self.members.workers
        if self._mode == "async":
            needed = frozenset()
        elif self._mode == "quorum":
            if index not in self._chosen:
                return False
            needed = self._chosen[index] & needed
        return bool(step.pushes) and needed <= step.pushes.keys()

    def _allowed(self, index: int, step: _Step) -> bool:
        """A step pushed with `hold` is updated when every worker in it has committed."""
        if not any(push.hold for push in step.pushes.values()):
            return True
        present = step.pushes.keys() & self.members.workers
        return present <= self._commits.get(index, set())
