"""The server's side of an exchange: when a chunk is updated, from whose gradients, and who is told.

`handle(event) -> actions`, with no clock, socket or tensor. Chunks are independent of each other,
so messages may come in any order, and twice. One rule covers the modes:

  mode      a step closes when                a worker is answered when the chunk has seen
  sync      every worker has pushed it        all steps up to its own
  bounded   every worker has pushed it        all steps up to its own, less `staleness`
  quorum    the chosen workers have pushed    its own step, counted or late
  async     at each push                      its own push

In `bounded` the update of a step is still the mean over all workers: `staleness = 0` is `sync`.
In `quorum` the arbiter chooses the first k workers to have made a whole step.

A closed step is *work*, which waits its turn here: `take` gives the most urgent (the chunk that
forward passes use first), `done` says who may be answered now. A chunk's version counts the updates
that are done. Where others go on without a lost worker, chunks are not independent: `losses.py`.
"""

import math
from collections.abc import Collection, Iterable

from paceline.errors import ExchangeError
from paceline.protocol.actions import (
    Action,
    Adopt,
    Drop,
    Event,
    Install,
    Keep,
    Lost,
    Send,
)
from paceline.protocol.closing import Chunks
from paceline.protocol.messages import (
    Admitted,
    Assign,
    AssignState,
    Chosen,
    Commit,
    Configure,
    Copied,
    Copy,
    Cut,
    Declare,
    Doubt,
    FetchState,
    Gone,
    Handed,
    Inquire,
    Join,
    Leave,
    Message,
    Missing,
    Newcomer,
    Orphans,
    Pull,
    Push,
    Reorder,
    Rescue,
    Sealed,
    Settled,
    Spare,
    State,
    Stop,
    Vow,
    Welcomed,
)
from paceline.protocol.placement import worker_of
from paceline.protocol.steps import Slot


class SeatMachine(Chunks):
    """One seat: the chunks it holds, and who makes their steps."""

    _step_beside: int | None = None
    """The step of the worker in this process when the last loss was heard of."""

    def handle(self, event: Message | Event) -> list[Action]:
        match event:
            case Push(worker, _, step) if self._is_too_late(worker, step):
                would_go_on = worker in self.roster.present
                return [*self._turn_away((worker,)), *self._go_on()] if would_go_on else []
            case Push():
                return self._push(event)
            case Spare(push):
                return self._keep_spare(push)
            case (
                Commit() | Declare() | Leave() | Configure() | Settled() | Sealed() | Vow()
                | Copied() | Orphans()
            ):  # fmt: skip
                if not self.roster.admits(event.worker, event.generation):
                    return []
                return self._told(event)
            case Chosen():
                return self._take_choice(event)
            case Pull():
                self._pulls.setdefault(event.chunk, []).append(event)
                return self._answer_pulls((event.chunk,))
            case Assign() | AssignState():
                return self._install(event)
            case FetchState() if self._homes.takes_in(event.chunk):
                self._fetches.append(event)
                return []
            case FetchState():
                return [Send(f"worker{event.worker}", State(event.chunk), event.chunk)]
            case Reorder():
                self._queue.reorder(event.first_use)
                return []
            case Join() | Admitted():
                return self._join(event)
            case Lost():
                self._step_beside = event.step
                return self._lose(event.member)
            case Doubt():
                cuts = self._losses.decided(event.workers)
                told = [Send(f"worker{event.worker}", cut) for cut in cuts]
                return [*told, *self._doubt(event.workers)]
            case Cut():
                return self._cut(event)
            case Inquire():
                missing = Missing(event.chunk, self.missing(event.chunk))
                return [Send(f"worker{event.worker}", missing)]
            case Handed():
                return self._adopt(event)
        raise ExchangeError(f"a server cannot handle {event!r}.")

    def _told(self, event: Message) -> list[Action]:
        match event:
            case Commit():
                # A worker commits a step only when all before it are closed everywhere.
                self._commits = {s: who for s, who in self._commits.items() if s >= event.step}
                self._commits.setdefault(event.step, {})[event.worker] = event
                return self._close_all()
            case Declare():
                if event.step >= self._oldest() and event.step not in self._chosen:
                    self._declared.setdefault(event.step, set()).add(event.worker)
                return self._choose()
            case Configure():
                self._settings.learn(event, self._slots.values())
                pushes = [push for push in self._unsettled if self._settings.knows(push)]
                self._unsettled = [push for push in self._unsettled if push not in pushes]
                counted = [action for push in pushes for action in self._count_push(push)]
                return [*counted, *self._close_all()]
            case Settled():
                self._admission.settle(event.worker, event.generation)
                return self._close_all()
            case Sealed():
                return self._seal(event.step + 1)
            case Vow():
                self._losses.vow(event)
                return self._decide_cut()
            case Leave():
                return self._leave(event)
            case Copied():
                return self._copied(event)
            case Orphans():
                return self._hear_of_orphans(event)
        return []

    def stop(self, reason: str) -> list[Send]:
        """Tell the workers why nobody can go on."""
        return [Send(f"worker{one}", Stop(reason)) for one in sorted(self.roster.present)]

    # Quorums.

    def _choose(self) -> list[Action]:
        """As arbiter: close the choice of every step that enough workers have made."""
        actions: list[Action] = []
        enough = min(self.rules.quorum, max(1, len(self.roster.present)))
        for step in [s for s, who in self._declared.items() if len(who) >= enough]:
            chosen = Chosen(step, tuple(sorted(self._declared.pop(step))))
            if step not in self._chosen and step >= self._oldest():
                self._last_choice = chosen
                told = [Send(f"worker{w}", chosen) for w in sorted(self.roster.present)]
                actions += [*told, *self._take_choice(chosen)]
        return actions

    def _take_choice(self, choice: Chosen) -> list[Action]:
        """Drop what came from others for this step; heard from several workers, done once."""
        if choice.step in self._chosen or choice.step < self._oldest():
            return []
        chosen = self._chosen[choice.step] = frozenset(choice.workers)
        actions: list[Action] = []
        for chunk, slot in self._slots.items():
            step = slot.steps.get(choice.step)
            for worker in sorted(step.pushes.keys() - chosen) if step else ():
                assert step is not None
                del step.pushes[worker]
                actions.append(Drop(chunk, worker, choice.step))
                if worker in slot.waiting:
                    self._wait(slot, choice.step, slot.waiting[worker][1], late=True)
        return [*actions, *self._close_all()]

    def _install(self, event: Assign | AssignState) -> list[Action]:
        if event.chunk not in self._slots:  # what a lost server had may be on its way here
            raise ExchangeError("a server was lost while weights or state were set anew.")
        if isinstance(event, Assign):
            self._unassigned.discard(event.chunk)
        return [Install(event), *self._answer_pulls((event.chunk,))]

    # Coming and going.

    def _join(self, event: Join | Admitted) -> list[Action]:
        """Take a worker in: as arbiter decide from which step on, else do as it decided."""
        newest = max((slot.closed for slot in self._slots.values()), default=0)
        told_others: list[Action] = []
        is_gone = self.roster.is_lost(event.worker) or self.roster.has_ended(event.worker)
        if isinstance(event, Join) and is_gone:
            return []  # overtaken by the news of that
        if isinstance(event, Join) and self._homes.lost:
            reason = f"{self._homes.names} was lost: this job takes no newcomers any more."
            return [Send(f"worker{event.worker}", Stop(reason))]
        if isinstance(event, Join) and self._end < math.inf:
            stop = Stop("the job ended before this worker took part.", over=int(self._end))
            return [Send(f"worker{event.worker}", stop)]
        if isinstance(event, Join) and self._losses.doubted:
            self._joins.append(event)
            return []
        if isinstance(event, Join):
            newest = max(newest, self._losses.sealed)
            others = self.roster.present - {event.worker}
            furthest = self._furthest() + 1 if self.rules.mode == "async" else newest
            admitted = self._admission.admit(event.worker, self.roster.generation, furthest, others)
            news = Newcomer(event.worker, admitted.step)
            told_others = [Send(f"worker{one}", news) for one in sorted(others)]
            answer: Message = admitted
        else:
            admitted = event
            answer = Welcomed(self.seat, event.generation)
        newcomer = admitted.worker, admitted.generation, admitted.step
        for worker, generation, step in (*admitted.others, newcomer):
            # Closed without it: it was lost, and the arbiter had heard of that before we have.
            overtaken = self.rules.waits_for_all and newest > step
            if not self.roster.knows(worker) and not overtaken:
                self.roster.join(worker, generation, step)
        told = [answer] if self._last_choice is None else [answer, self._last_choice]
        if self._losses.doubted and self._losses.serves:
            told.append(self._losses.doubt())
        sends = [Send(f"worker{event.worker}", message) for message in told]
        return [*told_others, *sends, *self._close_all(), *self._answer_pulls()]

    def _leave(self, event: Leave) -> list[Action]:
        worker, steps = event.worker, event.steps
        has_joined = self.roster.has_joined(worker)
        if has_joined:
            self._check_made_whole_steps(worker, steps)
        if has_joined and steps <= self.roster.since(worker):
            self._admission.lose(worker)
        self.roster.leave(worker, steps)
        self._losses.seal(event.sealed)
        self._losses.leave(steps)
        told = [*self._drop((worker,), steps), *self._copy_again((worker,))]
        if has_joined or not self.rules.exclusive:  # else all end together
            news = Gone(worker, steps, left=True)
            told += [Send(f"worker{one}", news) for one in sorted(self.roster.present)]
        furthest = {w: self._furthest_of(w) for w in sorted(self.roster.present)}
        told += self._turn_away([w for w, step in furthest.items() if self._is_too_late(w, step)])
        ahead = [step for w, step in furthest.items() if w in self.roster.present]
        told += [*self._check_ended(max(ahead, default=-1)), *self._go_on()]
        return [*told, *self._rescue()]

    def _go_on(self) -> list[Action]:
        """Decide again what depends on which workers are waited for."""
        if self.rules.whole:
            self._recount()
        closed = [*self._choose(), *self._close_all(), *self._answer_pulls()]
        return [*closed, *self._decide_cut()]

    def _check_made_whole_steps(self, worker: int, steps: int) -> None:
        """One that fails in the middle of a step may count in a part of it."""
        slots = [slot for slot in self._slots.values() if slot.seen.get(worker, -1) >= steps]
        if self.rules.waits_for_all and any(slot.has_begun(steps) for slot in slots):
            raise ExchangeError(f"worker{worker} failed in step {steps}, a part of which was done.")

    def _has_brought_nothing(self, worker: int) -> bool:
        """It joined, and no gradient of it is here: for all that this seat knows it can go as if it
        had not come."""
        is_new = worker in self.roster.present and self.roster.has_joined(worker)
        return is_new and not any(worker in slot.seen for slot in self._slots.values())

    @property
    def _end(self) -> float:
        """The first step that the job does not take; infinite while nobody knows."""
        return self.roster.end(exclusive=self.rules.exclusive)

    def _is_too_late(self, worker: int, step: float = math.inf) -> bool:
        """It joined a job that is over, before this step or at all, or has left: nobody waits for
        it."""
        if not self.roster.has_joined(worker):
            return False
        end = min(self._end, self.roster.until(worker))
        return end < math.inf and step >= end

    def _turn_away(self, workers: Iterable[int]) -> list[Action]:
        """They go on where the job is over; what they brought for later steps is dropped."""
        actions: list[Action] = []
        for worker in workers:
            steps = int(self._end)
            reason = f"the others have finished after {steps} steps, and so has worker{worker}."
            actions += [Send(f"worker{worker}", Stop(reason, over=steps)), *self._forget(worker)]
            actions += self._drop((worker,), steps)
            self.roster.send_away(worker, steps)
            actions += self._copy_again((worker,))
            self._losses.leave(steps)
            for slot in self._slots.values():
                slot.seen.pop(worker, None)
        return actions

    def _drop(self, workers: Collection[int], since: int) -> list[Action]:
        """What they have brought for this step and later ones."""
        actions: list[Action] = []
        for chunk, slot in self._slots.items():
            for index, step in slot.steps.items():
                for worker in set(workers) & step.pushes.keys() if index >= since else ():
                    del step.pushes[worker]
                    actions.append(Drop(chunk, worker, index))
        return actions

    def _lose(self, member: str) -> list[Action]:
        """What it sent counts where it came; from here on nobody waits for it."""
        worker = worker_of(member)
        if worker is None:
            return []  # the workers tell what that means
        if self.roster.has_ended(worker):
            self.roster.depart(worker)
            return [*self._forget(worker), *self._copy_again((worker,)), *self._rescue()]
        if self.rules.whole:
            return self._doubt((worker,))
        was_present, news = worker in self.roster.present, Gone(worker)
        if self._has_brought_nothing(worker):
            if self.rules.waits_for_all:  # elsewhere other seats may have something of it
                news = Gone(worker, self.roster.since(worker))
            self.roster.withdraw(worker)
        else:
            self._check_goes_on(worker)
            self.roster.lose(worker)
        told: list[Action] = []
        if was_present and self._slots:  # where nothing is served nobody knows what it brought
            told += [Send(f"worker{one}", news) for one in sorted(self.roster.present)]
        self._admission.lose(worker)
        for who in self._declared.values():
            who.discard(worker)
        return [*told, *self._forget(worker), *self._go_on()]

    def _forget(self, worker: int) -> list[Action]:
        """It is answered no more, and what it has sent too little of is dropped."""
        for chunk, pulls in self._pulls.items():
            self._pulls[chunk] = [pull for pull in pulls if pull.worker != worker]
        for slot in self._slots.values():
            slot.waiting.pop(worker, None)
        mine = [push for push in self._unsettled if push.worker == worker]
        self._unsettled = [push for push in self._unsettled if push.worker != worker]
        return [Drop(push.chunk, worker, push.step) for push in mine]

    def _doubt(self, workers: Iterable[int]) -> list[Action]:
        """Take nothing from the lost any more, and have the others find out from which step on they
        are missing everywhere. One that has finished here may not have got so far elsewhere."""
        dropped: list[Action] = []
        news = [worker for worker in workers if not self.roster.is_lost(worker)]
        for worker in news:
            self._check_goes_on(worker)
            if self._homes.is_open:
                raise ExchangeError(
                    f"worker{worker} was lost before all that {self._homes.names} had was with "
                    "others."
                )
            self.roster.doubt(worker)
            self._losses.doubted.add(worker)
            self._admission.lose(worker)
            self._joins = [join for join in self._joins if join.worker != worker]
            dropped += self._forget(worker)
        dropped += self._copy_again(news)
        if not news or not self._losses.serves:
            return dropped
        told = [] if self._losses.alone else self._tell_doubts()
        return [*dropped, *told, *self._decide_cut()]

    def _tell_doubts(self) -> list[Action]:
        if not self._losses.serves:
            return []
        present = sorted(self.roster.present)
        return [Send(f"worker{one}", self._losses.doubt()) for one in present]

    def _decide_cut(self) -> list[Action]:
        """As arbiter: once nobody can seal a step with the lost any more."""
        if self.seat != self._homes.arbiter:
            return []
        cut = self._losses.decide(self.roster.present)
        if cut is None:
            return []
        told = [Send(f"worker{one}", cut) for one in sorted(self.roster.present)]
        return [*told, *self._cut(cut)]

    def _cut(self, cut: Cut) -> list[Action]:
        """The lost count in every step before this one, and in none from it on."""
        actions = self._doubt(cut.lost)  # the news may be the first that is heard here of a loss
        if not self._losses.doubted.intersection(cut.lost):
            return []  # came before
        for worker in cut.lost:
            self.roster.cut(worker, cut.step)
        self._losses.cut(cut)
        actions += self._drop(cut.lost, cut.step)
        self._recount()
        actions += [*self._rescue(), *self._close_all(), *self._answer_pulls()]
        joins, self._joins = self._joins, []
        return [*actions, *(action for join in joins for action in self._join(join))]

    # Second homes.

    def _copied(self, event: Copied) -> list[Action]:
        slot = self._slots.get(event.chunk)
        if slot is None or event.version != slot.version:
            return []  # came before
        slot.is_copied, slot.keeper = True, event.worker
        return [*self._answer(slot), *self._answer_pulls()]

    def _copy_again(self, lost: Collection[int]) -> list[Action]:
        """Another second home for what the lost had."""
        actions: list[Action] = []
        for chunk, slot in self._slots.items() if self.rules.second_homes else ():
            if slot.keeper not in lost:
                continue
            slot.keeper = None
            if not slot.is_copied:
                actions += self._copy(chunk, slot)
                continue
            able = self.roster.expected(slot.version - 1) & self.roster.present
            having = sorted(able.difference([self._own_worker]))
            if having:
                slot.keeper = having[chunk % len(having)]
                actions.append(Send(f"worker{slot.keeper}", Copy(chunk, slot.version), chunk))
        return actions

    def _hear_of_orphans(self, event: Orphans) -> list[Action]:
        """A server was lost: take in the chunks that are dealt to this seat."""
        seats = [self._plan.seats[seat] for seat in event.lost if seat not in self._homes.lost]
        inside = [seat.worker for seat in seats if seat.worker is not None]
        for worker in filter(self.roster.has_ended, inside):
            self.roster.depart(worker)
        actions = self._doubt([w for w in inside if not self.roster.has_ended(w)])
        news = self._homes.hear(event)
        doubted = self._losses.doubted.difference(inside)
        others = [*sorted(doubted), *self._admission.pending] if news else []
        others += [worker for worker in event.joined if not self.roster.knows(worker)]
        if others:
            told = " and ".join(f"worker{worker}" for worker in others)
            raise ExchangeError(f"{self._homes.names} was lost while {told} came or went.")
        actions += self._seal(event.sealed)
        if not news:
            return [*actions, *self._rescue()]
        self._losses.move(self._homes.needed)
        self._recount()
        actions += [Drop(one.chunk, one.worker, one.step) for one in self._homes.drop_spares()]
        # This seat may be one that is asked whom it doubts since just now.
        actions += self._tell_doubts() if self._losses.doubted else []
        return [*actions, *self._decide_cut(), *self._rescue(), *self._close_all()]

    def _keep_spare(self, push: Push) -> list[Action]:
        """A gradient that stays in the process of the worker that made it, should both be lost."""
        if not self.roster.admits(push.worker, push.generation):
            return []
        is_kept, before = self._homes.put_spare(push)
        if not is_kept:
            return []
        replaced = [] if before is None else [Drop(before.chunk, before.worker, before.step)]
        return [*replaced, Keep(push), *self._gather()]

    def _tellers(self) -> frozenset[int]:
        """Workers that can say what they have: one that serves stays until all have finished."""
        return self.roster.present if self._own_worker is None else self.roster.alive

    def _rescue(self) -> list[Action]:
        """Ask for chunks that every worker has told of, once it is decided in which steps the lost
        count."""
        if self._losses.doubted:
            return []
        asked = list(self._homes.to_ask(self._tellers()))
        return [Send(f"worker{w}", Rescue(chunk, version)) for chunk, w, version in asked]

    def _adopt(self, handed: Handed) -> list[Action]:
        """A chunk is here: go on with it where its former home was."""
        if not self._homes.adopts(handed):
            return []
        spare, crew = self._homes.take_spare(handed.chunk), self.roster.expected(handed.version)
        counted = [one for one in [spare] if one and one.step == handed.version]
        counted = [one for one in counted if one.worker in crew]
        missing = crew - self.roster.present - {one.worker for one in counted}
        if missing:
            told = " and ".join(f"worker{worker}" for worker in sorted(missing))
            raise ExchangeError(
                f"{self._homes.names} was lost, and {told} is gone whose gradients it had."
            )
        self._losses.seal(handed.version)  # what was updated was sealed
        slot = self._slots[handed.chunk] = Slot(handed.version)
        slot.absent = handed.absent
        if not handed.bare and handed.worker != self._own_worker:
            slot.keeper = handed.worker  # else the next update finds another
        actions: list[Action] = [Adopt(handed)]
        for push in [*self._homes.take_early(handed.chunk), *counted]:
            actions += self._take(slot, push)
        if spare is not None:
            slot.waiting.pop(spare.worker, None)  # nobody is there to be answered
            actions += [] if counted else [Drop(spare.chunk, spare.worker, spare.step)]
        mine = [fetch for fetch in self._fetches if fetch.chunk == handed.chunk]
        self._fetches = [fetch for fetch in self._fetches if fetch not in mine]
        actions += [action for fetch in mine for action in self.handle(fetch)]
        self._recount()
        return [*actions, *self._close_all()]

    def _has_done_its_part(self, worker: int) -> bool:
        """It joined a job that is over, and no step needs a gradient of it any more."""
        last = self._end - 1
        brought = all(slot.seen.get(worker, -1) >= last for slot in self._slots.values())
        return self._is_too_late(worker) and (brought or not self.rules.waits_for_all)

    def _check_goes_on(self, worker: int) -> None:
        present = self.roster.present
        reason = self.rules.cannot_go_on(worker, len(present - {worker}))
        if worker in present and reason and not self._has_done_its_part(worker):
            raise ExchangeError(f"worker{worker} was lost{self._when(worker)}, and {reason}.")

    def _when(self, worker: int) -> str:
        """In which step; where nothing is served here, and all take the same one, that of the
        worker in this process."""
        step = self._step_beside if self.rules.exclusive else None
        if self._slots:
            seen = min(slot.seen.get(worker, -1) for slot in self._slots.values())
            step = max(seen + 1, self.roster.since(worker))
        return "" if step is None else f" in step {step}"
