"""The worker's side of an exchange: which chunk goes next, to whom, and which weights are there.

`handle(event) -> actions`, with no clock, socket or tensor. Once a step's gradients are made, the
chunks that the next forward pass needs first go first, whoever serves them: in the order in which
they were dealt, so that every seat gets its share of the link. While they are made, the newest
stretch of backward goes first, and each stretch in the order in which it was made: were the newest
chunk to go first, two workers a moment apart would send different ones, and servers would wait for
the second of each pair until the end of the step (docs/how-chunks-travel.md).

At most `window` chunks for each seat wait to depart, in all, so that an urgent chunk never queues
behind many others. The window opens when a chunk has *departed*: opened by the answer it would
deadlock, because an answer may wait for a worker that sends in another order.

A worker begins a step when it has the answers of the one before: the seats rely on it.
"""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence

from paceline.errors import ExchangeError
from paceline.protocol.actions import (
    Action,
    Asked,
    Assigned,
    Blamed,
    Configured,
    CrewChange,
    Departed,
    Dismissed,
    Enter,
    Event,
    Exit,
    Fetch,
    FetchStates,
    KeepCopy,
    KeepState,
    Lost,
    Normed,
    Ready,
    Rehomed,
    Send,
    Stepped,
    Usable,
    Used,
)
from paceline.protocol.homes import WorkerHomes
from paceline.protocol.losses import WorkerLosses
from paceline.protocol.messages import (
    Admitted,
    Answer,
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
    Doubted,
    FetchState,
    Gathered,
    Gone,
    Inquire,
    Join,
    Leave,
    Measured,
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
    Welcomed,
)
from paceline.protocol.plan import Plan

STRETCHES = 6
"""Into so many backward is divided. More of them leave chunks that others have sent for the end,
fewer let the first layers wait; 3 to 6 were alike on ideal links."""


class ExchangeMachine:
    """One worker's view of all chunks."""

    def __init__(self, plan: Plan, worker: int, *, step: int = 0, generation: int = 0) -> None:
        """`step`: the first this worker makes, from weights that have seen all before it."""
        self.worker, self.step, self.generation = worker, step, generation
        self.late_chunks = 0
        self._plan, self._owners = plan, plan.owners
        self._members = [seat.member for seat in plan.seats]
        self.own_seat = plan.seat_of(f"worker{worker}")
        """In this worker's process: what goes there waits for no link."""
        self._urgency: Sequence[int] = [chunk.first_use for chunk in plan.layout.chunks]
        self._versions = [step] * len(plan.owners)
        self._outstanding: dict[int, Push | Pull] = {}
        self._fetching: set[int] = set()
        """Chunks whose optimizer's state was asked for, and has not come."""
        self._made = 0
        self._step_on_hold: int | None = None
        """The step that waits for this worker's commit, from its first push on."""
        self._settings = 0
        self._norms: dict[int, list[float]] = {}
        """Chunk -> squared norms of the parts of its parameters, in the step on hold."""
        window = plan.rules.window
        self._window = math.inf if window is None else window * len(plan.seats)
        self._departing: set[int] = set()
        self._queue: list[tuple[int, int, Push]] = []
        """With what decides which goes next: its stretch and place in backward, or, once all are
        made, its place in the next forward pass and its number."""
        self._crew = dict.fromkeys(range(plan.workers), 0)
        """Those who are in the job, or will be from a step on."""
        self._known = set(self._crew)
        """Those who ever were: news of them may come twice."""
        self._homes = WorkerHomes(plan)
        self._losses = WorkerLosses(worker, self._homes.needed)
        self._welcomes: set[int] = set()
        """Seats that have not yet welcomed this worker."""
        self._exits = self._fails = self.has_left = False
        self.abandons = False
        """It failed, and others have what the seat in its process serves."""

    @property
    def outstanding(self) -> frozenset[int]:
        """Chunks whose gradient was made, or weights asked for, and whose answer has not come."""
        return frozenset(self._outstanding)

    def owner(self, chunk: int) -> str:
        """The member that serves it."""
        return self._members[self._owners[chunk]]

    def handle(self, event: Message | Event) -> list[Action]:
        match event:
            case Answer():
                return self._answered(event)
            case Ready():
                return self._ready(event)
            case Departed():
                self._departing.discard(event.chunk)
                return [*self._fill(), *self._leave()]
            case Chosen():
                # Each worker passes it on: one of those chosen may be lost before it does.
                return self._to_seats(event, but=self._homes.arbiter)
            case Stepped():
                return self._stepped(event)
            case Configured():
                self._settings += 1
                number, groups = self._settings, event.groups
                return self._to_seats(Configure(self.worker, number, groups, self.generation))
            case Used():
                self._urgency = event.first_use
                leads = self.worker == min(self._crew, default=0)
                return self._to_seats(Reorder(event.first_use)) if leads else []
            case Measured():
                return self._measured(event)
            case Missing():
                return [Blamed(event.chunk, tuple(event.workers))]
            case Copy():
                self._homes.copy(event.chunk, event.version)
                return [KeepCopy(event), *self._copied(event.chunk)]
            case Asked(chunk):
                return [self._to_seat(self._owners[chunk], Inquire(self.worker, chunk))]
            case Assigned(chunk, state):
                kind = AssignState if state else Assign
                return [Send(self.owner(chunk), kind(self.worker, chunk), chunk, seat=True)]
            case FetchStates():
                self._fetching = set(range(len(self._owners)))
                return self._fetch_states(self._fetching)
            case State(chunk):
                self._fetching.discard(chunk)
                return [KeepState(event)]
        return self._come_or_go(event)

    def _come_or_go(self, event: Message | Event) -> list[Action]:
        arbiter = self._homes.arbiter
        match event:
            case Fetch():
                bounded = self._plan.rules.mode == "bounded"  # else answers have one's own steps
                return self._pull(version=self.step if bounded else 0)
            case Enter():
                return [self._to_seat(arbiter, Join(self.worker))]
            case Admitted():
                return self._admitted(event)
            case Welcomed(seat, generation) if generation == self.generation:
                self._welcomes.discard(seat)
                return [] if self._welcomes else [*self._settled(), *self._leave()]
            case Welcomed():
                return []
            case Exit(failed):
                rules, self._exits, self._fails = self._plan.rules, True, failed
                self.abandons = failed and rules.second_homes
                serves = self.own_seat is not None and not rules.second_homes
                self.has_left |= failed and rules.least_workers is not None and not serves
                if failed and not self.has_left:
                    self._hurry()
                return [*self._fill(), *self._leave()]
            case Lost() if event.member in self._members and self._needs(event):
                return self._lose_seat(event.member)
            case Rescue(chunk, version) if version == self._versions[chunk]:
                handed = self._homes.handed(self.worker, chunk, version)
                return [Send(self._members[self._owners[chunk]], handed, chunk, seat=True)]
            case Rescue():
                return []  # came before
            case Lost():
                return []
            case Newcomer(worker, step) if worker not in self._known:
                self._known.add(worker)
                self._crew[worker] = step
                return [CrewChange(step, come=(worker,))]
            case Gone(worker) if worker in self._crew:
                return [self._without(event)]
            case Newcomer() | Gone():
                return []  # came before
            case Gathered():
                if not self._losses.gather(event):
                    return []
                sealed = Sealed(self.worker, event.step, self.generation)
                return [*self._to_seats(sealed), *self._leave()]
            case Doubted():
                return self._doubted(event)
            case Cut():
                return self._cut(event)
            case Stop(_, over) if over >= 0 and self.has_left:
                return []  # another seat has said so, or it was about to end
            case Stop(reason, over) if over >= 0:
                # The others may hear that it is gone before they hear that the job is over, and
                # servers end before this worker has looked up.
                self._exits = self.has_left = True
                leave = Leave(self.worker, over, self.generation, self._losses.sealed)
                return [*self._to_seats(leave), Dismissed(reason)]
            case Stop(reason):
                raise ExchangeError(reason)
        raise ExchangeError(f"a worker cannot handle {event!r}.")

    def _without(self, gone: Gone) -> CrewChange:
        came = self._crew.pop(gone.worker)  # it may not have taken a step yet
        who, cut = (gone.worker,), None if gone.step < 0 else gone.step
        since = came if cut is None else max(came, cut + self._plan.rules.cut_steps)
        if gone.left:
            return CrewChange(since, left=who, cut=cut)
        return CrewChange(since, lost=who, cut=cut)

    def _needs(self, lost: Lost) -> bool:
        """Its loss concerns this worker: also when it has finished, where it serves. Then it stays
        until all have, and others may need what is here."""
        stays = self.own_seat is not None and self._plan.rules.second_homes
        return not self._exits or (stays and not lost.ended)

    def _fetch_states(self, chunks: Collection[int]) -> list[Action]:
        asked = [FetchState(self.worker, chunk) for chunk in sorted(chunks)]
        return [self._to_seat(self._owners[fetch.chunk], fetch) for fetch in asked]

    def _doubted(self, event: Doubted) -> list[Action]:
        news = self._losses.doubt(event)
        told = self._to_seats(Doubt(self.worker, news), but=event.seat) if news else []
        return [*told, *self._vow(), *self._leave()]

    def _vow(self) -> list[Action]:
        vow = self._losses.vow(self.generation)
        return [] if vow is None else [self._to_seat(self._homes.arbiter, vow)]

    def _cut(self, cut: Cut) -> list[Action]:
        news = sorted(self._losses.cut(cut))
        if not news:
            return []  # came before
        shared_until = cut.step + self._plan.rules.cut_steps
        known = {worker: self._crew.pop(worker) for worker in news if worker in self._crew}
        crews = [
            CrewChange(max(start, shared_until), lost=(worker,), cut=cut.step)
            for worker, start in known.items()
        ]
        return [*crews, *self._to_seats(cut), *self._vow(), *self._leave()]

    def _to_seats(self, message: Message, but: int | None = None) -> list[Action]:
        seats = [s for s in range(len(self._members)) if s != but and s not in self._homes.lost]
        return [self._to_seat(seat, message) for seat in seats]

    def _to_seat(self, seat: int, message: Message) -> Send:
        return Send(self._members[seat], message, seat=True)

    # Gradients.

    def _ready(self, event: Ready) -> list[Action]:
        chunk = event.chunk
        if chunk in self._outstanding:
            raise ExchangeError(
                f"chunk {chunk} has two gradients in step {self.step}; "
                "call backward once per step, or all but the last time inside no_sync()."
            )
        if self._made == 0 and self._outstanding:
            waiting = sorted(self._outstanding)
            raise ExchangeError(f"step {self.step} begins before the weights of {waiting} came.")
        if self._made == 0 and self._plan.rules.mode == "quorum":
            self.step = min(self._versions)
        push = Push(
            self.worker,
            chunk,
            self.step,
            self._versions[chunk],
            event.empty,
            event.absent,
            event.hold,
            event.mean,
            self._settings,
            self.generation,
            event.weight,
        )
        if push.hold:
            self._step_on_hold = push.step
        self._outstanding[chunk] = push
        seat = self._owners[chunk]
        if seat == self.own_seat:
            return [*self._send_twice(push), *self._count_made()]
        stretch = STRETCHES * self._made // len(self._owners)
        heapq.heappush(self._queue, (-stretch, self._made, push))
        return [*self._fill(), *self._count_made()]

    def _count_made(self) -> list[Action]:
        self._made += 1
        if self._made < len(self._owners):
            return []
        if self._queue:
            self._queue = [(self._urgency[p.chunk], p.chunk, p) for _, _, p in self._queue]
            heapq.heapify(self._queue)
        made, self._made = self.step, 0
        self.step += 1
        if self._plan.rules.mode != "quorum":
            return []
        return [self._to_seat(self._homes.arbiter, Declare(self.worker, made, self.generation))]

    def _send(self, push: Push) -> Send:
        payload = None if push.empty else push.chunk
        return Send(self._members[self._owners[push.chunk]], push, payload, seat=True)

    def _send_twice(self, push: Push) -> list[Action]:
        """To its seat, and, where that is in this process, to the one that would take it in."""
        heir = self._homes.heirs.get(push.chunk)
        if heir is None or self._owners[push.chunk] != self.own_seat:
            return [self._send(push)]
        payload = None if push.empty else push.chunk
        spare = Send(self._members[heir], Spare(push), payload, seat=True)
        return [self._send(push), spare]

    def _fill(self) -> list[Action]:
        """Send while the window is open."""
        actions: list[Action] = []
        while self._queue and len(self._departing) < self._window:
            _, _, push = heapq.heappop(self._queue)
            if self._owners[push.chunk] != self.own_seat and self._window < math.inf:
                self._departing.add(push.chunk)
            actions += self._send_twice(push)
        return actions

    def _hurry(self) -> None:
        """It is about to go: what it has made goes before it, and no more of a step that it does
        not end."""
        if self._made:
            self._queue.clear()
        self._window = math.inf

    def _answered(self, answer: Answer) -> list[Action]:
        asked = self._outstanding.get(answer.chunk)
        step = asked.step if isinstance(asked, Push) else -1
        if asked is None or answer.step != step:
            return []  # came before
        del self._outstanding[answer.chunk]
        self._versions[answer.chunk] = answer.version
        self.late_chunks += answer.late
        usable = Usable(answer.chunk, answer.version, answer.absent)
        if not self._plan.rules.whole:
            return [usable, *self._leave()] if self._exits else [usable]
        self._losses.seal(answer.version)  # what is updated was sealed
        mean = isinstance(asked, Push) and asked.mean
        self._homes.answered(answer.chunk, answer.version, answer.absent, mean=mean)
        return [usable, *self._copied(answer.chunk), *self._leave()]

    def _copied(self, chunk: int) -> list[Action]:
        """Say so when weights and state of one update are here."""
        version = self._versions[chunk]
        if not self._homes.has_state(chunk, version):
            return []
        copied = Copied(self.worker, chunk, version, self.generation)
        return [self._to_seat(self._owners[chunk], copied)]

    def _stepped(self, event: Stepped) -> list[Action]:
        """A step on hold may be updated now."""
        step, self._step_on_hold = self._step_on_hold, None
        if step is None:
            return []
        self._norms = {}  # nobody asked for them
        commit = Commit(self.worker, step, event.scale, self._settings, self.generation)
        return self._to_seats(commit)

    def _measured(self, event: Measured) -> list[Action]:
        if event.step != self._step_on_hold:
            return []  # came before
        self._norms[event.chunk] = event.squared_norms
        if len(self._norms) < len(self._owners):
            return []
        layout, totals = self._plan.layout, [0.0] * len(self._plan.layout.parameters)
        for chunk, norms in sorted(self._norms.items()):
            for index, norm in zip(layout.chunks[chunk].parameters, norms, strict=True):
                totals[index] += norm
        self._norms = {}
        return [Normed(event.step, tuple(totals))]

    # Coming, going, moving.

    def _pull(self, version: int) -> list[Action]:
        actions: list[Action] = []
        for chunk, seat in enumerate(self._owners):
            pull = Pull(self.worker, chunk, version, self.generation)
            self._outstanding[chunk] = pull
            actions.append(self._to_seat(seat, pull))
        return actions

    def _admitted(self, admitted: Admitted) -> list[Action]:
        """Tell every other seat, and ask for the weights of the step to start at."""
        if admitted.generation <= self.generation:
            return []  # came before
        if self._homes.lost:
            raise ExchangeError(f"{self._homes.names} was lost while worker{self.worker} joined.")
        self.generation, self.step = admitted.generation, admitted.step
        self._welcomes = set(range(len(self._members))) - {self._homes.arbiter}
        self._crew = dict.fromkeys(admitted.crew, admitted.step)
        self._known = set(admitted.crew)
        version = 0 if self._plan.rules.mode == "async" else admitted.step
        told = self._to_seats(admitted, but=self._homes.arbiter)
        return [
            CrewChange(admitted.step, come=admitted.crew),
            *(told or self._settled()),
            *self._pull(version),
        ]

    def _settled(self) -> list[Action]:
        """Every seat has welcomed this worker."""
        return [self._to_seat(self._homes.arbiter, Settled(self.worker, self.generation))]

    def _leave(self) -> list[Action]:
        """Once that is wanted, every seat knows this worker, all that it made is on its way, and
        its last step is not left open for want of workers who carry news between seats."""
        is_sealed = self._losses.alone or self._losses.sealed >= self.step
        if not self._exits or self.has_left or self._welcomes:
            return []
        is_on_its_way = self._queue or self._departing
        is_chosen = self._plan.rules.mode != "quorum" or not self._outstanding
        if not self._fails and (is_on_its_way or not is_chosen):
            return []
        if self._plan.rules.whole and not is_sealed:
            return []
        self.has_left, steps = True, self.step
        if self._fails and self._step_on_hold is not None and not self.generation:
            steps = self._step_on_hold  # nobody says any more with which scale it is updated
        return self._to_seats(Leave(self.worker, steps, self.generation, self._losses.sealed))

    def may_end(self, *, served: bool) -> bool:
        """It has left, and the seat in its process, if there is one, has `served` all, or others
        go on with what it had."""
        return self.has_left and (served or self.abandons)

    @property
    def present_step(self) -> int:
        """The step whose answers it waits for, or else the next."""
        waits = any(isinstance(asked, Push) for asked in self._outstanding.values())
        return self.step - (waits and self._made == 0)

    def _lose_seat(self, member: str) -> list[Action]:
        """Tell the seats that are left what is here of its chunks, and go on with them."""
        if self._welcomes:
            raise ExchangeError(
                f"{member} has gone, or the whole job, before worker{self.worker} got in."
            )
        lost = f"{member} was lost in step {self.step}"
        if not self._plan.rules.second_homes:
            raise ExchangeError(f"{lost}, and with it the weights that it served.")
        seat = self._members.index(member)
        if others := self._losses.undecided.difference([self._plan.seats[seat].worker]):
            names = " and ".join(f"worker{worker}" for worker in sorted(others))
            raise ExchangeError(f"{lost}, when the loss of {names} was not settled.")
        if any(isinstance(asked, Pull) for asked in self._outstanding.values()):
            raise ExchangeError(f"{lost}, before worker{self.worker} had all weights.")
        orphans = self._homes.lose(seat)
        self._owners = self._homes.owners
        waiting = {push.chunk for _, _, push in self._queue}
        again = {
            chunk: push
            for chunk, push in self._outstanding.items()
            if chunk in orphans and chunk not in waiting and isinstance(push, Push)
        }
        told = [
            self._to_seat(seat, self._orphans(seat, orphans, again))
            for seat in range(len(self._members))
            if seat not in self._homes.lost
        ]
        sealed = self._losses.move(self._homes.needed, len(self._homes.lost))
        seals = [Sealed(self.worker, step, self.generation) for step in sealed]
        self._departing -= orphans
        kept = self._kept_here(orphans, waiting)
        sends = [send for push in again.values() for send in self._send_twice(push)]
        sends += [send for push in kept for send in self._send_twice(push)[1:]]
        sends += self._fetch_states(self._fetching & orphans)
        rehomed = Rehomed(member, self.step, self._owners)
        passed_on = [send for seal in seals for send in self._to_seats(seal)]
        return [
            *(rehomed, *told, *sends, *passed_on),
            *(*self._fill(), *self._vow(), *self._leave()),
        ]

    def _kept_here(self, orphans: Collection[int], waiting: Collection[int]) -> list[Push]:
        """Gradients for the seat in this process: others have them to keep from now on."""
        pushes = {c: push for c, push in self._outstanding.items() if isinstance(push, Push)}
        return [
            push
            for chunk, push in pushes.items()
            if self._owners[chunk] == self.own_seat and chunk not in {*orphans, *waiting}
        ]

    def _orphans(self, seat: int, orphans: Collection[int], again: Mapping[int, Push]) -> Orphans:
        pushed = {chunk: push.step for chunk, push in again.items()}
        holdings = tuple(
            self._homes.holding(chunk, self._versions[chunk], pushed.get(chunk, -1))
            for chunk in sorted(orphans)
            if self._owners[chunk] == seat
        )
        joined = tuple(sorted(worker for worker in self._crew if worker >= self._plan.workers))
        lost, sealed = self._homes.lost, self._losses.sealed
        return Orphans(self.worker, lost, holdings, joined, self.generation, sealed)
