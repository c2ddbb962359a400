"""A whole job in one process: the real machines, and every trouble that a schedule names.

Time is the number of events. A member that is paused takes part in none; between two that are cut
off nothing arrives. What must hold at every moment is checked by `Network` where it happens; what
must hold of the whole run is checked here:

- every worker that stays ends, within bounded time once troubles are over;
- each gradient is applied at most once, and staleness is never above its bound (`Network`);
- a seat says that an update is applied only when it is, and no worker goes on without its answer;
- one membership: in `sync` and `bounded` every chunk's step is made of the same workers, but for
  those that were lost in that very step where the rest is to stop then;
- where the others go on (`whole`) the update of a step is the mean over the samples of just those
  who made it, each sample once, and no sample is missing but in the steps before it was divided
  anew (`Network`);
- no update that a worker was told of is lost with a server, and who takes its chunks in goes on
  from weights and state of the same update, the newest that anybody was told of (`Network`);
- the loss of one that serves stops the job only where a worker came or went just then, in the very
  last step, and before each of its chunks was updated;
- a run without a lost or new worker decides what the untroubled run decides, chunk by chunk.
"""

import random
from typing import Any

import msgspec

from paceline.errors import ExchangeError
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.seat import SeatMachine
from tests.protocol.network import Network, make
from tests.simulation.schedule import NAMED, Schedule, Trouble

STEPS_OF_ONE_WHO = {0: 0, 1: 20, 2: 4}
"""Of eight who join one leaves at once, one in the middle, one would go on at the end."""


class Job(Network):
    """The network of a job in which members pause and ways are cut."""

    def __init__(self, schedule: Schedule, machines: Any = (ExchangeMachine, SeatMachine)) -> None:
        asked = {**schedule.mode, "whole": schedule.whole}
        if schedule.inside and schedule.servers:
            asked["placement"] = "optimal"
        plan = make(schedule.workers, schedule.servers, schedule.chunks, **asked)
        script = {"schedule": schedule.changes_rate, "touches": schedule.clips}
        loses_servers = any(trouble.kind == "kill server" for trouble in schedule.troubles)
        script["hasty"] = schedule.hasty and not loses_servers  # who would hand over its chunks?
        rng = random.Random(schedule.seed)
        self.events = 0
        self.newest = schedule.workers
        self.lost_at: dict[int, int] = {}
        self.stopped = ""
        self.may_stop = False
        """A server was lost when others came or went too."""
        super().__init__(
            rng, plan, schedule.steps, machines=machines, twice=schedule.twice, **script
        )

    # What may happen.

    def _happen(self) -> bool:
        self.events += 1
        self._end_troubles()
        if super().happen():
            return True
        if not (self.paused or self.cuts):
            return False
        # Nothing moves until a trouble is over: go there.
        self.events = min((*self.paused.values(), *self.cuts.values()))
        return True

    def _end_troubles(self) -> None:
        if not (self.paused or self.cuts):
            return
        self.paused = {name: until for name, until in self.paused.items() if until > self.events}
        self.cuts = {pair: until for pair, until in self.cuts.items() if until > self.events}

    # What goes wrong.

    def trouble(self, trouble: Trouble) -> None:
        names = sorted(self.members)
        one = names[trouble.who % len(names)]
        other = names[trouble.other % len(names)]
        until = self.events + trouble.events
        match trouble.kind:
            case "pause":
                self.paused[one] = until
            case "cut" if one != other:
                self.cuts[frozenset((one, other))] = until
            case "join" if self._takes_newcomers():
                self.join(self.newest, STEPS_OF_ONE_WHO.get(trouble.who))
                self.newest += 1
            case "kill":
                self._kill_one(trouble.who)
            case "kill server":
                self._kill_server(trouble.who)

    def _takes_newcomers(self) -> bool:
        """Who comes after a server was lost is told that it cannot."""
        inside = any(seat.worker is not None for seat in self.plan.seats)
        return not self.killed_seats and not (inside and self.plan.rules.second_homes)

    def _kill_one(self, number: int) -> None:
        able = [t.machine.worker for t in self.trainers.values() if not t.done]
        able = [worker for worker in able if self.can_lose(worker)]
        if able:
            self.may_stop |= self.is_rehoming()
            worker = able[number % len(able)]
            seat = self.plan.seat_of(f"worker{worker}")
            if seat is not None:
                self.may_stop |= (
                    self._is_early(seat) or self._is_undecided() or self._is_some_at_the_end()
                )
            self.lost_at[worker] = self.trainers[f"worker{worker}"].machine.step
            self.kill(worker)

    def _kill_server(self, number: int) -> None:
        able = [s for s in range(len(self.plan.seats)) if s not in self.killed_seats]
        able = able if self.plan.rules.second_homes and len(able) > 1 else []
        able = [seat for seat in able if self.plan.seats[seat].worker is None]
        if not able or self.is_rehoming() or not any(not t.done for t in self.trainers.values()):
            return
        seat = able[number % len(able)]
        self.may_stop |= (
            self._is_early(seat)
            or any(t.joins for t in self.trainers.values())
            or self._is_some_at_the_end()
            or self._is_undecided()
        )
        self.kill_seat(seat)

    def _is_some_at_the_end(self) -> bool:
        """Who has done the last step leaves, with the copies that it keeps for others."""
        return any(t.machine.step >= t.steps for t in self.trainers.values())

    def _is_early(self, seat: int) -> bool:
        """Some chunk of it was not updated yet, or not without those that are lost, or not since it
        was taken in: the state may be with the worker beside it alone."""
        answered: dict[int, int] = {}
        for (_, chunk), weights in self.weights.items():
            answered[chunk] = max(answered.get(chunk, 0), len(weights))
        mine = self.chunks_of(seat)
        news = [chunk for chunk in mine if answered.get(chunk, 0) <= self.adopted.get(chunk, -1)]
        if news and self.plan.seats[seat].worker is not None:
            return True
        oldest = min((answered.get(chunk, 0) for chunk in mine), default=1)
        return oldest < max((1, *self.cuts_of()))

    def _is_undecided(self) -> bool:
        """Somebody has not heard yet from which step on another is there or not."""
        seats = [member.seat for member in self.members.values() if member.seat is not None]
        crews = [t.machine._losses._decided for t in self.trainers.values()]
        known = [*crews, *({w for cut in s._losses._cuts for w in cut.lost} for s in seats)]
        return any(s._admission.pending for s in seats) or any(k != self.killed for k in known)

    def is_rehoming(self) -> bool:
        """Not everybody has heard of a lost server, or its chunks are not all at their new homes,
        with what had gone to it."""
        seats = [member.seat for member in self.members.values() if member.seat is not None]
        workers = [t.machine for t in self.trainers.values() if not t.done]
        served = {chunk for _, chunk in self.served}
        num_lost = len(self.killed_seats)
        has_heard = all(len(one._homes.lost) == num_lost for one in (*seats, *workers))
        is_open = any(s._homes.is_open for s in seats)
        return len(served) < len(self.plan.owners) or not has_heard or is_open

    def happen(self) -> bool:
        if self.stopped:
            return False
        try:
            return self._happen()
        except ExchangeError as error:
            if not self.may_stop:
                raise
            self.stopped = str(error)
            return False

    # What must hold in the end.

    def check(self) -> None:
        if self.stopped:
            return
        self.check_ended()
        if self.plan.rules.mode not in NAMED:
            return
        makers: dict[int, dict[int, frozenset[int]]] = {}
        for work in self.works:
            if work.kind != "measure":
                chunks = makers.setdefault(work.step, {})
                assert work.chunk not in chunks, "a step of a chunk was closed twice"
                chunks[work.chunk] = frozenset(worker for worker, _, _ in work.parts)
        for step, chunks in makers.items():
            took_it = any(t.machine.step > step for t in self.trainers.values())
            whole = len(chunks) == len(self.plan.owners) or not took_it  # those who did are lost
            assert whole, f"step {step} lacks chunks"
            differing = frozenset.union(*chunks.values()) - frozenset.intersection(*chunks.values())
            assert not (differing and self.plan.rules.whole), f"step {step} is not of one crew"
            blamed = {w for w in differing if w not in self.lost_at}
            assert not blamed, f"step {step}: some chunks were summed without {sorted(blamed)}"
            partly = {
                w for w in differing if step < self.lost_at[w] - 1 - self.plan.rules.staleness
            }
            assert not partly, f"step {step}: {sorted(partly)} were not yet lost"


def simulate(schedule: Schedule, machines: Any = (ExchangeMachine, SeatMachine)) -> Job:
    """Run a schedule to its end and check it; raises what does not hold."""
    job = Job(schedule, machines)
    for trouble in schedule.troubles:
        for _ in range(trouble.after):
            job.happen()
        if not job.stopped:
            job.trouble(trouble)
    job.run()
    job.check()
    if _changes_nothing(schedule):
        calm = Job(untroubled(schedule), machines)
        calm.run()
        assert job.decisions() == calm.decisions(), "troubles changed what was computed"
    return job


def untroubled(schedule: Schedule) -> Schedule:
    return msgspec.structs.replace(schedule, troubles=(), twice=False)


def _changes_nothing(schedule: Schedule) -> bool:
    """Where all are waited for, delays alone must not change a thing."""
    lasting = any(trouble.kind in ("kill", "join", "kill server") for trouble in schedule.troubles)
    return schedule.mode["mode"] in NAMED and not lasting
