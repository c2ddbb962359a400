"""The chunks of one seat: gradients that came, when a step of each closes, the work it makes.

What `seat.py` says of modes is decided here; who comes and goes, and what that means, is there.
What is remembered of steps is in `steps.py`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

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
    Copy,
    FetchState,
    Gathered,
    Join,
    Measured,
    Pull,
    Push,
    Settings,
)
from paceline.protocol.plan import Plan
from paceline.protocol.steps import PendingGradients, SettingsBook, Slot, WorkQueue


class Chunks:
    """One seat's view of the chunks it holds."""

    def __init__(self, plan: Plan, seat: int, *, version: int = 0, assigned: bool = True) -> None:
        """`version`: updates the chunks have seen already. `assigned`: their weights are there;
        else pulls wait until worker 0 has sent them."""
        self.seat, self.rules = seat, plan.rules
        self.roster = Roster(plan.workers, version)
        self.staleness: dict[int, Counter[int]] = defaultdict(Counter)
        """Worker -> updates its weights lacked when its gradient came -> how often."""
        self.late: Counter[int] = Counter()
        """Worker -> gradients that came after their step had closed."""
        self._plan = plan
        self._slots = {chunk: Slot(version) for chunk in plan.chunks_of(seat)}
        self._queue = WorkQueue(plan)
        self._settings = SettingsBook(plan)
        self._unsettled: list[Push] = []
        """Pushes whose settings have not come."""
        self._commits: dict[int, dict[int, Commit]] = {}
        self._declared: dict[int, set[int]] = {}
        self._chosen: dict[int, frozenset[int]] = {}
        self._last_choice: Chosen | None = None
        """As arbiter. Those it told may be lost before other seats know; a newcomer tells it then.
        No earlier one can be unknown: a choice is made when all seats have closed those before."""
        self._unassigned = set() if assigned else set(self._slots)
        self._pulls: dict[int, list[Pull]] = {}
        """Those of each chunk that wait for a version, or for weights to be there at all."""
        self._fetches: list[FetchState] = []
        """For the state of chunks that this seat takes in and does not have yet."""
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
        return sorted(w for w in self._committing(slot.closed, step) if w not in commits)

    def _missing_in(self, index: int) -> list[int]:
        """Workers whose gradient of any chunk is missing."""
        missing: set[int] = set()
        for slot in self._slots.values():
            step = slot.steps.get(index)
            missing |= self.roster.expected(index) - (step.pushes.keys() if step else set())
        return sorted(missing)

    def take(self) -> Work | None:
        """The most urgent work; the caller does it and then calls `done`."""
        return self._queue.take()

    def done(self, work: Work, squared_norms: Iterable[float] = ()) -> list[Action]:
        """Work is done (`measure`: with the squared norm of each parameter's part)."""
        if work.kind == "measure":
            measured = Measured(work.chunk, work.step, list(squared_norms))
            return [Send(f"worker{w}", measured) for w in sorted(self.roster.present)]
        slot = self._slots[work.chunk]
        slot.version += 1
        slot.absent = work.absent if work.kind == "mean" else ()
        actions = self._answer(slot) if work.kind == "mean" else self._copy(work.chunk, slot)
        return [*actions, *self._answer_pulls((work.chunk,))] if self._pulls else actions

    def _copy(self, chunk: int, slot: Slot) -> list[Action]:
        """Answer; where chunks have second homes, give its state one before any other worker is."""
        due: list[int] = []
        if self.rules.second_homes:
            waiting = ((w, needed) for w, (needed, *_) in slot.waiting.items())
            due = sorted(w for w, at in waiting if at <= slot.version and w != self._own_worker)
        slot.is_copied = not due
        if slot.is_copied:
            return self._answer(slot)
        if slot.keeper not in due:
            slot.keeper = due[chunk % len(due)]
        copy = Send(f"worker{slot.keeper}", Copy(chunk, slot.version), chunk)
        return [copy, *self._answer(slot)]

    # Gradients.

    def _slot(self, chunk: int) -> Slot:
        try:
            return self._slots[chunk]
        except KeyError:
            raise ExchangeError(f"chunk {chunk} is not served here.") from None

    def _push(self, push: Push) -> list[Action]:
        if not self.roster.admits(push.worker, push.generation):
            self.late[push.worker] += 1  # sent before it was lost, and overtaken by that news
            return []
        if self._homes.is_open:
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
        if not self._settings.knows(push):
            self._unsettled.append(push)
            return []
        return self._count_push(push)

    def _count_push(self, push: Push) -> list[Action]:
        slot = self._slots[push.chunk]
        index = slot.closed if self.rules.mode == "async" else push.step
        newest = push.step if self.rules.waits_for_all else slot.closed
        self.staleness[push.worker][newest - push.version] += 1
        notes = self._check_ended(push.step)
        chosen = self._chosen.get(index)
        if index < slot.closed or (chosen is not None and push.worker not in chosen):
            # Where all are waited for, a closed step holds its gradient already: the chunk came
            # here from another seat, and the answer was lost on the way.
            late = self.rules.mode == "quorum" or push.worker not in self.roster.expected(index)
            self._wait(slot, index, push, late)
            dropped = Drop(push.chunk, push.worker, push.step)
            return [*notes, dropped, *self._answer(slot)]
        self._wait(slot, index, push, late=False)
        step = slot.steps.get(index)
        if step is None:
            step = slot.steps[index] = PendingGradients()
        step.pushes[push.worker] = push
        is_counted = self.rules.whole and index >= self._losses.gathered
        if is_counted and self.roster.expected(index) <= step.pushes.keys():
            self._full[index] += 1
            if self._full[index] == len(self._slots):
                return [*notes, *self._gather()]
        return [*notes, *self._close(push.chunk, slot)]

    def _wait(self, slot: Slot, index: int, push: Push, late: bool) -> None:
        if late:
            self.late[push.worker] += 1
        slot.waiting[push.worker] = index + 1 - self.rules.staleness, push, late

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
            due, settled = self._homes.due_spares(crew), self._settings.knows
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
                    self._queue.put(Work("measure", chunk, index, self._parts(index, step)))
                break
            self._queue.put(self._decide(chunk, index, step, commits))
            slot.steps.pop(index, None)
            slot.closed += 1
            if self._chosen:
                self._chosen.pop(self._oldest() - 1, None)
        return self._answer(slot)

    def _answer(self, slot: Slot) -> list[Action]:
        version, actions = slot.version, list[Action]()
        due = [worker for worker, (needed, *_) in slot.waiting.items() if needed <= version]
        if not slot.is_copied:
            due = [worker for worker in due if worker == slot.keeper]
        for worker in due:
            _, push, late = slot.waiting.pop(worker)
            answer = Answer(push.chunk, version, late, slot.absent, push.step)
            actions.append(Send(f"worker{worker}", answer, push.chunk))
        return actions

    def _needed(self, index: int) -> frozenset[int] | None:
        """Whose gradients the step waits for; None while a quorum is not chosen."""
        if self.rules.waits_for_all:
            return self.roster.expected(index)
        if self.rules.mode == "async":
            return frozenset()
        chosen = self._chosen.get(index)
        return None if chosen is None else chosen & self.roster.expected(index)

    def _complete(self, slot: Slot) -> PendingGradients | None:
        """The open step of a chunk, if all that it waits for is there."""
        index, step = slot.closed, slot.steps.get(slot.closed)
        if index >= self._admission.limit:
            return None
        if self.rules.whole and not self._may_close(index):
            return None
        needed = self._needed(index)
        if needed is None:
            return None
        if step is None:
            # All who would have made it were lost: an empty step, so that others can go on.
            named = self.rules.mode != "async" and bool(self.roster.present)
            return PendingGradients() if named and not needed else None
        return step if needed <= step.pushes.keys() else None

    def _may_close(self, index: int) -> bool:
        """Where steps close as a whole: every seat has all gradients of this one."""
        return index < self._losses.sealed

    def _committing(self, index: int, step: PendingGradients) -> list[int]:
        """Workers that must say with which scale the step is updated. Those who joined follow the
        others, and may fail before they have said so."""
        expected, lost = self.roster.expected(index), self.roster.is_lost
        holders = [w for w, push in step.pushes.items() if push.hold and w in expected]
        there = [worker for worker in holders if not lost(worker)]
        return [worker for worker in there if not self.roster.has_joined(worker)] or there

    def _needed_commits(self, index: int, step: PendingGradients) -> dict[int, Commit] | None:
        """The commits a step needs to be updated; None while one is missing."""
        if not any(push.hold for push in step.pushes.values()):
            return {}
        known, needed = self._commits.get(index, {}), self._committing(index, step)
        commits = {worker: known[worker] for worker in needed if worker in known}
        if len(commits) < len(needed) or not all(map(self._settings.knows, commits.values())):
            return None
        return commits

    def _decide(
        self, chunk: int, index: int, step: PendingGradients, commits: dict[int, Commit]
    ) -> Work:
        first = self._guide(step, commits)
        scale, settings = 1.0, None
        if first is not None:
            told = commits.get(first.worker, first)
            scale, settings = self._scale(index, step, commits, told), self._settings.of(told)
            if self.rules.waits_for_all:
                self._check_alike(index, step, commits, settings)
        only_mean = step.mean or not self.rules.updates
        kind: Kind = "mean" if only_mean else "apply" if step.measured else "update"
        rate = self._rate_factor(index, step)
        parts = self._parts(index, step)
        return Work(kind, chunk, index, parts, settings, scale, rate, step.absent())

    def _guide(self, step: PendingGradients, commits: dict[int, Commit]) -> Push | None:
        """Whose settings a step goes by: of those who have said them, which one that was lost may
        not have, one who was there from the start; where workers differ, who brings a gradient."""

        def order(push: Push) -> tuple[bool, bool, bool, int]:
            is_told = push.worker in commits or not push.hold
            return not is_told, push.generation > 0, push.empty, push.worker

        return min(step.pushes.values(), key=order, default=None)

    def _scale(
        self, index: int, step: PendingGradients, commits: dict[int, Commit], told: Push | Commit
    ) -> float:
        """Those who joined later follow the others."""
        founders = [c.scale for c in commits.values() if not step.pushes[c.worker].generation]
        if len(set(founders)) > 1:
            scales = ", ".join(f"{scale:g}" for scale in sorted(set(founders)))
            raise ExchangeError(
                f"workers scale the gradient of step {index} by different factors, {scales}: clip "
                "by the norm of all gradients on every worker, or on none."
            )
        return told.scale if isinstance(told, Commit) else 1.0

    def _parts(self, index: int, step: PendingGradients) -> tuple[Part, ...]:
        has_left = self.rules.waits_for_all and self.roster.lacks(index, self.rules.cut_steps)
        return step.parts(lacking=has_left or self._losses.lacks(index))

    def _check_alike(
        self,
        index: int,
        step: PendingGradients,
        commits: dict[int, Commit],
        settings: list[Settings] | None,
    ) -> None:
        """Those who joined later follow the others."""
        for worker, push in step.pushes.items():
            if push.generation == 0 and not self.roster.is_lost(worker):
                self._settings.check_alike(worker, commits.get(worker, push), settings, index)

    def _rate_factor(self, index: int, step: PendingGradients) -> float:
        """One over 1 + the updates that the weights of this step's gradients lacked, on average."""
        if not self.rules.staleness_aware:
            return 1.0
        behind = [max(0, index - p.version) for p in step.pushes.values() if not p.empty]
        return len(behind) / (len(behind) + sum(behind)) if behind else 1.0

    # Pulls.

    def _answer_pulls(self, chunks: Iterable[int] | None = None) -> list[Action]:
        """Of these chunks, or of all."""
        actions: list[Action] = []
        for chunk in list(self._pulls) if chunks is None else chunks:
            waiting = self._pulls.pop(chunk, ())
            if not waiting:
                continue
            due = [pull for pull in waiting if self._is_due(pull)]
            version = self._slot(chunk).version
            for pull in due:
                answer = Answer(chunk, version)
                actions.append(Send(f"worker{pull.worker}", answer, chunk))
            if len(due) < len(waiting):
                self._pulls[chunk] = [pull for pull in waiting if pull not in due]
        return actions

    def _is_due(self, pull: Pull) -> bool:
        slot = self._slot(pull.chunk)
        is_there = slot.is_copied and slot.version >= pull.version
        is_known = self.roster.admits(pull.worker, pull.generation)
        return is_known and is_there and pull.chunk not in self._unassigned

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

    def _furthest_of(self, worker: int) -> int:
        return max((slot.seen.get(worker, -1) for slot in self._slots.values()), default=-1)

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
