"""The chunks of one seat: gradients that came, when a step of each closes, the work it makes.

What `seat.py` says of modes is decided here; who comes and goes, and what that means, is there.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from paceline.errors import ExchangeError
from paceline.protocol.actions import (
    Action,
    Drop,
    Keep,
    Kind,
    Note,
    Part,
    Send,
    Work,
)
from paceline.protocol.admission import Admission
from paceline.protocol.homes import SeatHomes
from paceline.protocol.losses import SeatLosses
from paceline.protocol.membership import Roster
from paceline.protocol.messages import (
    Answer,
    Chosen,
    Commit,
    Configure,
    Copy,
    Gathered,
    Join,
    Measured,
    Pull,
    Push,
    Settings,
)
from paceline.protocol.plan import Plan


class Step:
    """The gradients of one chunk and step that have come so far."""

    def __init__(self) -> None:
        self.pushes: dict[int, Push] = {}
        self.measured = False

    def parts(self, *, lacking: bool = False) -> tuple[Part, ...]:
        """`lacking`: somebody with whom the samples were divided is not among them."""
        weight = 1 / max(1, len(self.pushes))
        if lacking:
            weight = 1 / (sum(push.weight for push in self.pushes.values()) or 1.0)
        pushes = [self.pushes[worker] for worker in sorted(self.pushes)]
        return tuple((push.worker, push.step, weight) for push in pushes if not push.empty)

    def absent(self) -> tuple[int, ...]:
        """Parameters that no worker had a gradient for; all of a chunk's when all are empty."""
        pushes = self.pushes.values()
        some = [push for push in pushes if not push.empty] or list(pushes)
        return tuple(sorted(set.intersection(*(set(push.absent) for push in some)))) if some else ()

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
        self.steps: dict[int, Step] = {}
        self.seen: dict[int, int] = {}
        """Worker -> the step of its last push: what is not above it came before."""
        self.waiting: dict[int, tuple[int, Answer]] = {}
        """Worker -> the version that may answer it, and the answer but for its version."""
        self.absent: tuple[int, ...] = ()
        """Of the newest mean: parameters that nobody had a gradient for."""
        self.keeper: int | None = None
        """The worker that has the newest state too, or will."""
        self.is_copied = True
        """It has; others may be answered."""


class Chunks:
    """One seat's view of the chunks it holds."""

    def __init__(self, plan: Plan, seat: int, *, version: int = 0, assigned: bool = True) -> None:
        """`version`: updates the chunks have seen already. `assigned`: their weights are there;
        else pulls wait until worker 0 has sent them."""
        self.seat, self.rules = seat, plan.rules
        self.roster = Roster(plan.workers, version)
        self.staleness: dict[int, Counter[int]] = {}
        """Worker -> updates its weights lacked when its gradient came -> how often."""
        self.late: Counter[int] = Counter()
        """Worker -> gradients that came after their step had closed."""
        self._plan = plan
        self._slots = {chunk: Slot(version) for chunk in plan.chunks_of(seat)}
        self._urgency: Sequence[int] = [chunk.first_use for chunk in plan.layout.chunks]
        self._queue: list[tuple[int, int, Work]] = []
        self._count = 0
        self._settings: dict[int, dict[int, list[Settings]]] = {}
        """Worker -> number -> settings of each group."""
        self._unsettled: list[Push] = []
        """Pushes whose settings have not come."""
        self._commits: dict[int, dict[int, Commit]] = {}
        self._declared: dict[int, set[int]] = {}
        self._chosen: dict[int, frozenset[int]] = {}
        self._last_choice: Chosen | None = None
        """As arbiter. Those it told may be lost before other seats know; a newcomer tells it then.
        No earlier one can be unknown: a choice is made when all seats have closed those before."""
        self._unassigned = set() if assigned else set(self._slots)
        self._pulls: list[Pull] = []
        self._admission = Admission(plan.rules)
        self._homes = SeatHomes(plan, seat)
        self._losses = SeatLosses(plan, seat, version, self._homes.needed)
        self._own_worker = plan.seats[seat].worker
        """In this seat's process: it would be lost with it."""
        self._full: Counter[int] = Counter()
        """Step -> chunks that have all its gradients, where steps close as a whole."""
        self._joins: list[Join] = []
        """Who asks while it is not decided how others have left."""
        self._noted: set[int] = set()
        """Workers whose early end was noted."""

    @property
    def over(self) -> bool:
        """Every worker has left, and what they had sent is done."""
        return not self.roster.present and not self._queue

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def version(self, chunk: int) -> int:
        return self._slots[chunk].version

    def missing(self, chunk: int) -> list[int]:
        """Workers that the open step of a chunk really waits for."""
        if self._homes.takes_in(chunk):
            return self._homes.silent(chunk, self.roster.present)
        slot = self._slot(chunk)
        step = slot.steps.get(slot.closed)
        pushed = set(step.pushes) if step else set()
        if slot.closed >= self._admission.limit:
            return self._admission.pending
        if self.rules.whole and slot.closed >= self._losses.sealed:
            return self._missing_in(slot.closed)
        needed = self._needed(slot.closed)
        if needed is None:  # a quorum that is not chosen: who could still make it
            declared = self._declared.get(slot.closed, set())
            return sorted(self.roster.present - declared - pushed)
        if needed - pushed or step is None:
            return sorted(needed - pushed)
        commits = self._commits.get(slot.closed, {})
        return sorted(w for w in needed if step.pushes[w].hold and w not in commits)

    def _missing_in(self, index: int) -> list[int]:
        """Workers whose gradient of any chunk is missing."""
        missing: set[int] = set()
        for slot in self._slots.values():
            step = slot.steps.get(index)
            missing |= self.roster.expected(index) - (step.pushes.keys() if step else set())
        return sorted(missing)

    def take(self) -> Work | None:
        """The most urgent work; the caller does it and then calls `done`."""
        return heapq.heappop(self._queue)[2] if self._queue else None

    def done(self, work: Work, squared_norms: Iterable[float] = ()) -> list[Action]:
        """Work is done (`measure`: with the squared norm of each parameter's part)."""
        if work.kind == "measure":
            measured = Measured(work.chunk, work.step, list(squared_norms))
            return [Send(f"worker{w}", measured) for w in sorted(self.roster.present)]
        slot = self._slots[work.chunk]
        slot.version += 1
        slot.absent = work.absent if work.kind == "mean" else ()
        copied = [] if work.kind == "mean" else self._copy(work.chunk, slot)
        return [*copied, *self._answer(slot), *self._answer_pulls()]

    def _copy(self, chunk: int, slot: Slot) -> list[Action]:
        """Give the state of a chunk a second home, before any other worker is answered."""
        waiting = slot.waiting.items()
        due = sorted(
            w for w, (needed, _) in waiting if needed <= slot.version and w != self._own_worker
        )
        slot.is_copied = not (self.rules.second_homes and due)
        if slot.is_copied:
            return []
        if slot.keeper not in due:
            slot.keeper = due[chunk % len(due)]
        return [Send(f"worker{slot.keeper}", Copy(chunk, slot.version), chunk)]

    # Gradients.

    def _slot(self, chunk: int) -> Slot:
        try:
            return self._slots[chunk]
        except KeyError:
            raise ExchangeError(f"chunk {chunk} is not held by this server.") from None

    def _push(self, push: Push) -> list[Action]:
        if not self.roster.admits(push.worker, push.generation):
            self.late[push.worker] += 1  # sent before it was lost, and overtaken by that news
            return []
        self._homes.pushed(push)
        if self._homes.takes_in(push.chunk):
            return [Keep(push)] if self._homes.put_early(push) else []
        slot = self._slot(push.chunk)
        if push.step <= slot.seen.get(push.worker, -1):
            return []  # came before
        return [Keep(push), *self._take(slot, push)]

    def _take(self, slot: Slot, push: Push) -> list[Action]:
        """Of a gradient that is kept."""
        slot.seen[push.worker] = push.step
        if not self._knows_settings(push):
            self._unsettled.append(push)
            return []
        return self._count_push(push)

    def _count_push(self, push: Push) -> list[Action]:
        slot = self._slots[push.chunk]
        index = slot.closed if self.rules.mode == "async" else push.step
        self._count_staleness(slot, push)
        notes = self._check_ended(push.step)
        answer = Answer(push.worker, push.chunk, 0, step=push.step)
        chosen = self._chosen.get(index)
        if index < slot.closed or (chosen is not None and push.worker not in chosen):
            # Where all are waited for, a closed step holds its gradient already: the chunk came
            # here from another seat, and the answer was lost on the way.
            late = self.rules.mode == "quorum" or push.worker not in self.roster.expected(index)
            self._wait(slot, index, answer, late)
            dropped = Drop(push.chunk, push.worker, push.step)
            return [*notes, dropped, *self._answer(slot)]
        self._wait(slot, index, answer, late=False)
        step = slot.steps.setdefault(index, Step())
        step.pushes[push.worker] = push
        is_counted = self.rules.whole and index >= self._losses.gathered
        if is_counted and self.roster.expected(index) <= step.pushes.keys():
            self._full[index] += 1
            if self._full[index] == len(self._slots):
                return [*notes, *self._gather()]
        return [*notes, *self._close(push.chunk, slot)]

    def _wait(self, slot: Slot, index: int, answer: Answer, late: bool) -> None:
        if late:
            self.late[answer.worker] += 1
            answer = Answer(answer.worker, answer.chunk, 0, late=True, step=answer.step)
        slot.waiting[answer.worker] = index + 1 - self.rules.staleness, answer

    def _count_staleness(self, slot: Slot, push: Push) -> None:
        newest = push.step if self.rules.mode in ("sync", "bounded") else slot.closed
        counts = self.staleness.setdefault(push.worker, Counter())
        counts[newest - push.version] += 1

    def _close_all(self) -> list[Action]:
        told = self._announce() if self.rules.whole else []
        closed = [a for chunk, slot in self._slots.items() for a in self._close(chunk, slot)]
        return [*told, *closed]

    # Steps that close as a whole.

    def _gather(self) -> list[Action]:
        """All gradients of some step are here."""
        sealed = self._losses.sealed
        told = self._announce()
        return [*told, *self._close_all()] if self._losses.sealed > sealed else told

    def _announce(self) -> list[Action]:
        """Say of every further step whose gradients are all here; a seat alone may close it."""
        losses = self._losses
        actions: list[Action] = []
        while self._is_full(losses.gathered):
            step = losses.gathered
            losses.gathered += 1
            del self._full[step]
            if losses.alone:
                losses.seal(step + 1)
                continue
            crew, moves = tuple(sorted(self.roster.expected(step))), len(self._homes.lost)
            gathered = Gathered(self.seat, step, crew, moves)
            actions += [Send(f"worker{w}", gathered) for w in sorted(self.roster.present)]
        return actions

    def _is_full(self, step: int) -> bool:
        if not self._losses.serves or self._losses.doubted or self._homes.is_short:
            return False
        if step >= self._admission.limit:
            return False
        if crew := self.roster.expected(step):
            if self._full[step] != len(self._slots):
                return False
            due, settled = self._homes.due_spares(crew), self._knows_settings
            if not all(self._homes.has_spare(chunk, step, settled) for chunk in due):
                return False
            return bool(self._slots or due)
        return bool(self.roster.present)  # all who would have made it were lost: it is empty

    def _seal(self, steps: int) -> list[Action]:
        if steps <= self._losses.sealed:
            return []  # another worker has said so
        self._losses.seal(steps)
        for step in [step for step in self._full if step < steps]:
            del self._full[step]
        return self._close_all()

    def _close(self, chunk: int, slot: Slot) -> list[Action]:
        """Close every step that is complete, in order, then answer who may be answered."""
        while (step := self._complete(slot)) is not None:
            index = slot.closed
            commits = self._needed_commits(index, step)
            if commits is None:
                if not step.measured:
                    step.measured = True
                    self._enqueue(Work("measure", chunk, index, self._parts(index, step)))
                break
            self._enqueue(self._decide(chunk, index, step, commits))
            slot.steps.pop(index, None)
            slot.closed += 1
            if self._chosen:
                self._chosen.pop(self._oldest() - 1, None)
        return self._answer(slot)

    def _answer(self, slot: Slot) -> list[Action]:
        due = [worker for worker, (needed, _) in slot.waiting.items() if needed <= slot.version]
        if not slot.is_copied:
            due = [worker for worker in due if worker == slot.keeper]
        actions: list[Action] = []
        for worker in due:
            _, held = slot.waiting.pop(worker)
            answer = Answer(worker, held.chunk, slot.version, held.late, slot.absent, held.step)
            actions.append(Send(f"worker{worker}", answer, held.chunk))
        return actions

    def _needed(self, index: int) -> frozenset[int] | None:
        """Whose gradients the step waits for; None while a quorum is not chosen."""
        if self.rules.mode == "async":
            return frozenset()
        if self.rules.mode == "sync" or self.rules.mode == "bounded":
            return self.roster.expected(index)
        chosen = self._chosen.get(index)
        return None if chosen is None else chosen & self.roster.expected(index)

    def _complete(self, slot: Slot) -> Step | None:
        """The open step of a chunk, if all that it waits for is there."""
        index, step = slot.closed, slot.steps.get(slot.closed)
        if index >= self._admission.limit or not self._may_close(index):
            return None
        needed = self._needed(index)
        if step is None:
            # All who would have made it were lost: an empty step, so that others can go on.
            named = self.rules.mode != "async" and bool(self.roster.present)
            return Step() if named and needed == frozenset() else None
        return step if needed is not None and needed <= step.pushes.keys() else None

    def _may_close(self, index: int) -> bool:
        """Where steps close as a whole: every seat has all gradients of this one."""
        return not self.rules.whole or index < self._losses.sealed

    def _needed_commits(self, index: int, step: Step) -> dict[int, Commit] | None:
        """The commits a step needs to be updated; None while one is missing."""
        holders = [worker for worker, push in step.pushes.items() if push.hold]
        if not holders:
            return {}
        known, expected = self._commits.get(index, {}), self.roster.expected(index)
        there = [w for w in holders if w in expected and not self.roster.is_lost(w)]
        commits = {worker: known.get(worker) for worker in there}
        found = {worker: commit for worker, commit in commits.items() if commit is not None}
        if len(found) < len(commits) or not all(map(self._knows_settings, found.values())):
            return None
        return found

    def _decide(self, chunk: int, index: int, step: Step, commits: dict[int, Commit]) -> Work:
        scales = {commit.scale for commit in commits.values()} or {1.0}
        if len(scales) > 1:
            raise ExchangeError(f"workers scale the gradient of step {index} differently: {scales}")
        parts = self._parts(index, step)
        # One that was lost may not have said by which settings it goes.
        known = [w for w, _, _ in parts if w in commits or not step.pushes[w].hold]
        first = step.pushes[known[0]] if known else None
        settings = None
        if first is not None:
            held = commits.get(first.worker)
            number = first.settings if held is None else held.settings
            settings = self._settings[first.worker][number] if number else None
            if self.rules.mode in ("sync", "bounded"):
                self._check_alike(index, step, commits, settings)
        only_mean = step.mean or not self.rules.updates
        kind: Kind = "mean" if only_mean else "apply" if step.measured else "update"
        rate = self._rate_factor(index, step)
        return Work(kind, chunk, index, parts, settings, scales.pop(), rate, step.absent())

    def _parts(self, index: int, step: Step) -> tuple[Part, ...]:
        return step.parts(lacking=self._losses.lacks(index))

    def _check_alike(
        self,
        index: int,
        step: Step,
        commits: dict[int, Commit],
        settings: list[Settings] | None,
    ) -> None:
        """All gradients of a step are updated with one rate, which all workers must have set; those
        who joined later follow the others."""
        wanted = settings or self._plan.groups
        for worker, push in step.pushes.items():
            if self.roster.is_lost(worker):
                continue
            held = commits.get(worker)
            number = push.settings if held is None else held.settings
            other = self._settings[worker][number] if number else self._plan.groups
            if push.generation == 0 and other is not wanted and other != wanted:
                raise ExchangeError(
                    f"worker{worker} has set its optimizer otherwise than the others in step "
                    f"{index}: every worker must set the same. Decide by a number that is the same "
                    "on all, such as paceline.mean(loss)."
                )

    def _rate_factor(self, index: int, step: Step) -> float:
        """One over 1 + the updates that the weights of this step's gradients lacked, on average."""
        behind = [max(0, index - p.version) for p in step.pushes.values() if not p.empty]
        if not self.rules.staleness_aware or not behind:
            return 1.0
        return len(behind) / (len(behind) + sum(behind))

    # The queue.

    def _enqueue(self, work: Work) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self._urgency[work.chunk], self._count, work))

    def _reorder(self, first_use: Sequence[int]) -> None:
        self._urgency = first_use
        self._queue = [(first_use[work.chunk], count, work) for _, count, work in self._queue]
        heapq.heapify(self._queue)

    # Settings, pulls.

    def _knows_settings(self, message: Push | Commit) -> bool:
        number = message.settings
        return number == 0 or number in self._settings.get(message.worker, {})

    def _configure(self, message: Configure) -> None:
        """Learn settings, and forget those that nothing open goes by.

        What is under way names the settings before these at the earliest: a worker changes them
        once a step, and begins a step when all that it pushed has come.
        """
        known = self._settings.setdefault(message.worker, {})
        known[message.number] = message.groups
        pushes = [
            step.pushes[message.worker]
            for slot in self._slots.values()
            for step in slot.steps.values()
            if message.worker in step.pushes
        ]
        oldest = min([message.number - 1, *(push.settings for push in pushes)])
        for number in [number for number in known if number < oldest]:
            del known[number]

    def _answer_pulls(self) -> list[Action]:
        if not self._pulls:
            return []
        actions: list[Action] = []
        waiting = []
        for pull in self._pulls:
            slot = self._slot(pull.chunk)
            version, is_there = slot.version, slot.is_copied and slot.version >= pull.version
            known = self.roster.admits(pull.worker, pull.generation)
            if pull.chunk in self._unassigned or not is_there or not known:
                waiting.append(pull)
            else:
                answer = Answer(pull.worker, pull.chunk, version)
                actions.append(Send(f"worker{pull.worker}", answer, pull.chunk))
        self._pulls = waiting
        return actions

    def _recount(self) -> None:
        """Which steps have all their gradients may be others, now that others make them."""
        self._full = Counter(
            index
            for slot in self._slots.values()
            for index, step in slot.steps.items()
            if index >= self._losses.gathered and self.roster.expected(index) <= step.pushes.keys()
        )

    def _oldest(self) -> int:
        return min((slot.closed for slot in self._slots.values()), default=0)

    def _furthest(self) -> int:
        """The furthest step of which a gradient has come."""
        return max((max(s.seen.values(), default=-1) for s in self._slots.values()), default=-1)

    def _check_ended(self, step: int) -> list[Action]:
        """Some worker takes this step: where steps are exclusive all end together, or the script is
        not what it was; elsewhere it is noted."""
        if step < self.roster.first_end:
            return []
        ended = {w: s for w, s in self.roster.ended(step).items() if w not in self._noted}
        told = ", ".join(
            f"worker{worker} ended after {steps} steps" for worker, steps in ended.items()
        )
        if self.rules.exclusive:
            raise ExchangeError(
                f"{told}, and others are at step {step + 1}: every worker must take the same "
                "number of steps. Take batches from paceline.shard(loader), and skip or stop on "
                "all workers alike."
            )
        self._noted.update(ended)
        return [Note(f"{told}, and others go on.")] if ended else []
