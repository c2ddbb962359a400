"""A world for tests: any message under way may arrive next, and whoever can compute may do so next.

The members and machines are the real ones; only the choice of what happens next is random. What
must hold at every moment is checked where it happens, what must hold at the end in `check_ended`.
"""

import math
from collections import Counter

import msgspec

from paceline import spec
from paceline.protocol.actions import (
    Adopt,
    CrewChange,
    Departed,
    Dismissed,
    Drop,
    Enter,
    Exit,
    Keep,
    KeepCopy,
    KeepState,
    Normed,
    Note,
    Rehomed,
    Usable,
    Work,
)
from paceline.protocol.chunks import ParameterSize
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.member import Member
from paceline.protocol.messages import (
    Admitted,
    Answer,
    Copy,
    Cut,
    Gone,
    Handed,
    Newcomer,
    Orphans,
    Push,
    Spare,
    State,
)
from paceline.protocol.plan import Shape, make_plan, why_no_second_homes, workers_serve
from paceline.protocol.seat import SeatMachine
from tests.protocol.trainer import SAMPLES, Trainer, part

MOST_EVENTS = 5_000


FIRST = frozenset((Newcomer, Admitted, Cut, Copy, Orphans, Gone))
"""What is sent behind these on the same way stays behind them."""


def make(workers, servers, chunks, *, whole=False, stops=False, **options):
    """A plan in which any worker may be lost; `whole`: from all chunks of a step alike. `stops`:
    the job may be over by that, as it is where nobody asked for another. Every second parameter
    spans two chunks, and the first of these holds the one before it too."""
    sizes = [48 if index % 2 else 16 for index in range(chunks)]
    parameters = [ParameterSize(name=f"p{i}", elements=size) for i, size in enumerate(sizes)]
    if not servers:
        options["placement"] = "colocated"
    server = spec.Server(chunk="128B", **options)
    shape = Shape(workers=workers, servers=servers, goes_on=whole)
    if workers_serve(server, shape) and why_no_second_homes(server, shape):
        shape = Shape(workers=workers, servers=servers)  # refused where others are to go on
    plan = make_plan(parameters, server, shape)
    if stops:
        return plan
    rules = msgspec.structs.replace(plan.rules, least_workers=0, leader=None)
    return msgspec.structs.replace(plan, rules=rules)


def is_for(flight, seat):
    """Whether it is a message for the seat of another member, or one for its worker."""
    return flight[0] in ("message", "again") and flight[3].seat == seat


class World:
    """One member's."""

    def __init__(self, network, name):
        self.network, self.name = network, name

    def now(self):
        self.network.moment += 0.001
        return self.network.moment

    def moves(self, send):
        return 0 if send.payload is None or self.network.shared else 64

    def post(self, to, sends):
        self.network.post(self.name, to, sends)

    def do(self, action):
        self.network.do(self.name, action)


class Network:
    def __init__(self, rng, plan, steps, *, machines=(ExchangeMachine, SeatMachine), **script):
        self.rng, self.plan, self.steps, self.script = rng, plan, steps, script
        self.shared = script.pop("shared", False)
        self.twice = script.pop("twice", False)
        self.slow = script.pop("slow", None)
        """(from, to)"""
        self.killed, self.killed_seats = set(), set()
        self.served = {(owner, chunk): () for chunk, owner in enumerate(plan.owners)}
        """Seat and chunk -> what its weights have been through: each update, in order."""
        self.weights, self.copies = {}, {}
        """Worker and chunk -> the same of its weights, and of each version's state."""
        self.adopted = {}
        """Chunk -> the version it had when it was taken in last."""
        self.moment = 0.0
        self.payloads, self.arriving = {}, ()
        self.flight = []
        """(kind, from, to, what): packets' messages, departures, work."""
        self.dismissed = []
        self.paused, self.cuts = {}, {}
        """Members that do nothing for now, and pairs between which nothing passes."""
        self.stirred = set()
        """Members to which something has happened: the others have nothing new to do."""
        self.members, self.trainers, self.gone = {}, {}, {}
        self.kept, self.applied, self.dropped = {}, Counter(), Counter()
        self.works, self.notes, self.pushes = [], [], []
        self.versions = Counter()
        """Chunk -> updates done."""
        self.absent, self.means = {}, {}
        """What each gradient lacks, by chunk, worker and step; what nobody brought of the mean that
        is answered with, by chunk and version."""
        self.machines = machines
        seats = {seat.member: index for index, seat in enumerate(plan.seats)}
        for name in {**{f"worker{w}": w for w in range(plan.workers)}, **seats}:
            seat = machines[1](plan, seats[name]) if name in seats else None
            worker = int(name[6:]) if name.startswith("worker") else None
            self.add(name, worker, seat)

    def add(self, name, worker, seat, joins=False, steps=None):
        machine = None if worker is None else self.machines[0](self.plan, worker)
        member = self.members[name] = Member(name, World(self, name), machine, seat)
        self.stirred.add(name)
        if machine is not None:
            chunks = len(self.plan.owners)
            steps = self.steps if steps is None else steps
            self.trainers[name] = Trainer(member, chunks, steps, script=self.script, joins=joins)

    # What members want.

    def post(self, source, to, sends):
        for send in sends:
            if isinstance(send.message, Answer):
                self.check_answer(send.message)
            self.flight.append(("message", source, to, send))
            self.carry(source, send)
            if isinstance(send.message, Push) and self.plan.rules.window is not None:
                self.flight.append(("departed", source, source, send.message.chunk))
            if isinstance(send.message, Spare):
                heir = self.plan.seat_of(to)
                assert to != source
                assert (heir, send.message.push.chunk) not in self.served

    def check_answer(self, answer):
        chunk, version, is_pulled = answer.chunk, answer.version, answer.step < 0
        assert version <= self.versions[chunk], "not done yet"
        assert is_pulled or answer.absent == self.means.get((chunk, version), ())

    def carry(self, source, send):
        """What its payload says, at the moment it is sent: machines see none."""
        match send.message:
            case Answer(chunk=chunk) | Copy(chunk=chunk) | State(chunk=chunk):
                self.payloads[id(send)] = self.served[self.plan.seat_of(source), chunk]
            case Handed() as handed:
                self.payloads[id(send)] = self.hand(source, handed)

    def hand(self, source, handed):
        weights = self.weights[source, handed.chunk]
        state = self.copies.get((source, handed.chunk), {}).get(handed.version)
        assert handed.bare or state == weights, "weights and state are of two updates"
        assert len(weights) == handed.version, "not the version it is said to be"
        return weights

    def unpack(self, to, send):
        """The payload is where the receiver wants it, before it hears of the message."""
        match send.message:
            case Answer(chunk=chunk, version=version):
                self.weights[to, chunk] = self.payloads[id(send)]
            case Copy(chunk, version):
                self.copies.setdefault((to, chunk), {})[version] = self.payloads[id(send)]
            case State(chunk):
                update = self.payloads[id(send)]
                assert len(update) >= len(self.weights.get((to, chunk), ())), "older than weights"
            case Handed():
                self.arriving = self.payloads[id(send)]

    def adopt(self, seat, chunk, version, weights):
        """What the lost server had done beyond is gone, and nobody may have been told of it."""
        told = [w for (name, c), w in self.weights.items() if c == chunk and name in self.members]
        assert all(len(other) <= version for other in told), "an update that was told of is lost"
        assert all(weights[: len(other)] == other for other in told), "other weights"
        self.served[seat, chunk] = weights
        self.adopted[chunk] = version
        self.versions[chunk] = version
        self.works = [w for w in self.works if w.chunk != chunk or w.step < version]
        for key in [k for k in self.applied if k[0] == chunk and k[3] >= version]:
            del self.applied[key]

    def do(self, name, action):
        match action:
            case Keep(push):
                key = name, push.chunk, push.worker, push.generation, push.step
                assert key not in self.kept, "a gradient was taken twice"
                self.kept[key] = push
                self.pushes.append(push)
                self.absent[push.chunk, push.worker, push.step] = {*push.absent}
            case Drop():
                push = self.forget(name, action.chunk, action.worker, action.step)
                serves = (self.plan.seat_of(name), push.chunk) in self.served
                if serves and not self.applied[push.chunk, push.worker, push.generation, push.step]:
                    self.dropped[action.worker, action.chunk] += 1
            case Adopt(handed):
                local = f"worker{handed.worker}" == name
                weights = self.hand(name, handed) if local else self.arriving
                self.adopt(self.plan.seat_of(name), handed.chunk, handed.version, weights)
            case Usable(chunk) if (self.plan.seat_of(name), chunk) in self.served:
                self.weights[name, chunk] = self.served[self.plan.seat_of(name), chunk]
            case Work():
                self.flight.append(("work", name, name, action))
            case Note():
                self.notes.append(action.text)
            case Normed(step, norms):
                assert list(norms) == [p.elements for p in self.plan.layout.parameters]
                self.trainers[name].normed = step
            case KeepState(state):
                self.trainers[name].states.add(state.chunk)
            case CrewChange():
                self.trainers[name].book.hear(action)
            case Dismissed():
                self.dismissed.append(name)
            case Usable() | KeepCopy() | Rehomed():
                pass
            case _:
                raise AssertionError(action)

    def forget(self, name, chunk, worker, step):
        wanted = name, chunk, worker, step
        found = [k for k in self.kept if (*k[:3], k[4]) == wanted]
        assert found, "a gradient is asked for that is not there"
        return self.kept.pop(found[0])

    def perform(self, name, work):
        self.works.append(work)
        if work.kind != "apply":
            for worker, step, _ in work.parts:
                push = self.forget(name, work.chunk, worker, step)
                key = work.chunk, worker, push.generation, step
                self.applied[key] += 1
                assert self.applied[key] == 1, "a gradient was applied twice"
                if self.plan.rules.mode in ("sync", "bounded"):
                    assert push.step == work.step
        if work.kind != "measure":
            self.versions[work.chunk] += 1
            self.served[self.plan.seat_of(name), work.chunk] += ((work.step, work.parts),)
            self.check_absent(work)
        norms = self.norms(work.chunk) if work.kind == "measure" else ()
        self.members[name].finished(work, norms)

    def check_absent(self, work):
        """No part of it brought these parameters."""
        lacks = [self.absent[work.chunk, worker, step] for worker, step, _ in work.parts]
        assert {*work.absent} == (set.intersection(*lacks) if lacks else set())
        absent = work.absent if work.kind == "mean" else ()
        self.means[work.chunk, self.versions[work.chunk]] = absent

    def norms(self, chunk):
        """As if every element were one."""
        span, places = self.plan.layout.chunks[chunk], self.plan.layout.places
        inside = [places[parameter] for parameter in span.parameters]
        return [min(p.stop, span.stop) - max(p.start, span.start) for p in inside]

    # What happens.

    def run(self):
        for _ in range(MOST_EVENTS):
            if not self.happen():
                return self
        raise AssertionError("it goes on and on")

    def happen(self):
        if self.stirred:
            self.settle()
        flight = self.able()
        makers = [name for name, trainer in self.trainers.items() if trainer.unmade]
        if self.paused:
            makers = [name for name in makers if name not in self.paused]
        num_moves = len(flight) + len(makers)
        if not num_moves:
            return False
        if self.slow is not None:
            # On the one way that is slow things move only when nothing else does.
            fast = [index for index in flight if self.flight[index][1:3] != self.slow]
            flight = fast if fast or makers else flight
            num_moves = len(flight) + len(makers)
        move = self.rng.choice(range(num_moves))
        if move < len(flight):
            self.arrive(flight[move])
        else:
            name = makers[move - len(flight)]
            trainer = self.trainers[name]
            trainer.compute(self.rng.choice(sorted(trainer.unmade)), self.rng)
            self.stirred.add(name)
        return True

    def settle(self):
        """Whoever can go on by itself does: it changes nothing for the others."""
        due = self.stirred.difference(self.paused) if self.paused else self.stirred
        names = due if len(due) == 1 else [name for name in self.members if name in due]
        for name in names:
            if name in self.trainers:
                self.trainers[name].settle()
        for name in names:
            self.members[name].work()
        self.stirred = self.stirred - due

    def able(self):
        """What may happen next. News of a loss comes behind all that the lost one had sent there,
        and what was sent behind the news of who comes or goes stays behind it; else anything may
        overtake. In one pass, for a million schedules are long."""
        found, held, busy = [], set(), None
        paused, cuts = self.paused, self.cuts
        for index, (kind, source, to, what) in enumerate(self.flight):
            if kind == "lost":
                if busy is None:
                    busy = {f[1:3] for f in self.flight if f[0] in ("message", "again")}
                if (source, to) in busy:
                    continue
            elif held and (source, to) in held:
                continue
            if kind == "message" and type(what.message) in FIRST:
                held.add((source, to))
            if to in paused or (cuts and frozenset((source, to)) in cuts):
                continue
            found.append(index)
        return found

    def arrive(self, index):
        kind, source, to, what = self.flight.pop(index)
        if to not in self.members:
            return
        self.stirred.add(to)
        match kind:
            case "message":
                self.unpack(to, what)
                self.members[to].receive(what.message, for_seat=what.seat)
                if self.dismissed:
                    self.end(self.dismissed.pop())
                elif self.twice and self.rng.random() < 0.2:
                    self.flight.append(("again", source, to, what))
            case "again":
                self.members[to].receive(what.message, for_seat=what.seat)
            case "departed" if to in self.trainers:
                self.members[to].tell(Departed(what))
            case "work":
                self.perform(to, what)
            case "lost":
                self.members[to].lose(source)

    # Coming and going.

    def end(self, name):
        """One who joined was told that the job is over."""
        assert self.trainers[name].is_new
        self.gone[name] = self.trainers.pop(name)
        self.killed.add(int(name.removeprefix("worker")))
        del self.members[name]
        self.stirred.discard(name)
        self.flight = [f for f in self.flight if f[2] != name]
        self.flight += [("lost", name, seat.member, None) for seat in self.plan.seats]

    def kill(self, worker):
        """It dies: of what it had sent some is lost, and then every seat hears of it."""
        name = f"worker{worker}"
        self.gone[name] = self.trainers.pop(name)
        self.killed.add(worker)
        if (seat := self.plan.seat_of(name)) is not None:
            self.kill_seat(seat)
            return
        del self.members[name]
        self.stirred.discard(name)
        self.flight = [
            f for f in self.flight if f[2] != name and (f[1] != name or self.rng.random() < 0.5)
        ]
        for seat in self.plan.seats:
            self.flight.append(("lost", name, seat.member, None))

    def fail(self, worker):
        """Its script raises: what it sends last arrives, and then its connections close."""
        name = f"worker{worker}"
        self.members[name].tell(Exit(failed=True))
        self.gone[name] = self.trainers.pop(name)
        self.killed.add(worker)
        del self.members[name]
        self.stirred.discard(name)
        self.flight = [f for f in self.flight if f[2] != name]
        self.flight += [("lost", name, seat.member, None) for seat in self.plan.seats]

    def kill_seat(self, seat):
        """A server dies, or a worker that serves: of what each of its sides had sent to another
        only the first part comes."""
        name = self.plan.seats[seat].member
        del self.members[name]
        self.stirred.discard(name)
        self.killed_seats.add(seat)
        self.kept = {key: push for key, push in self.kept.items() if key[0] != name}
        self.served = {key: value for key, value in self.served.items() if key[0] != seat}
        for to in self.members if name.startswith("worker") else self.trainers:
            for side in (False, True):
                sent = [f for f in self.flight if f[1:3] == (name, to) and is_for(f, side)]
                unsent = sent[self.rng.randint(0, len(sent)) :]
                self.flight = [f for f in self.flight if not any(f is one for one in unsent)]
            self.flight.append(("lost", name, to, None))
        self.flight = [f for f in self.flight if f[2] != name and not self.is_on_the_way(f, name)]

    def is_on_the_way(self, flight, seat):
        """A push to it, of which its worker is not told yet that it has departed."""
        kind, source, _, what = flight
        is_there = kind == "departed" and source in self.trainers
        return is_there and self.members[source].worker.owner(what) == seat

    def chunks_of(self, seat):
        return [chunk for one, chunk in self.served if one == seat]

    def can_lose(self, worker):
        """One that serves takes its chunks with it, unless they have second homes; where steps
        close as a whole somebody who takes part must be left, or the job is over."""
        name, whole = f"worker{worker}", self.plan.rules.whole
        others = [t for n, t in self.trainers.items() if n != name and not (t.done or t.joins)]
        stays = self.plan.seat_of(name) is not None and not self.plan.rules.second_homes
        return not stays and bool(others or not whole)

    def join(self, worker, steps=None):
        """`steps`: another number of them than the others take."""
        name = f"worker{worker}"
        self.add(name, worker, None, joins=True, steps=steps)
        self.members[name].tell(Enter())

    # What must hold.

    def check_ended(self):
        assert not self.flight, "something is under way for ever"
        waiting = {name: t.machine.outstanding for name, t in self.trainers.items() if not t.done}
        if self.plan.rules.whole and all(m.seat.over for m in self.members.values() if m.seat):
            # The job was over before it could take in some who asked.
            waiting = {n: out for n, out in waiting.items() if self.trainers[n].machine.generation}
        assert not waiting, "someone waits for ever"
        left = [
            key
            for key in self.kept
            if key[2] not in self.killed and (self.plan.seat_of(key[0]), key[1]) in self.served
        ]
        assert not left, "a gradient was taken and never summed"
        seats = [m.seat for m in self.members.values() if m.seat is not None]
        assert all(seat.over for seat in seats), "a seat waits for ever"
        rules = self.plan.rules
        if rules.mode in ("sync", "bounded"):
            behind = max((p.step - p.version for p in self.pushes), default=0)
            assert behind <= rules.staleness, "staler than its bound"
            for name, trainer in self.trainers.items():
                self.check_crew(name, trainer)
            late = {worker for worker, _ in self.dropped} - self.killed
            assert not late, "a worker that is waited for was left out"
        if rules.whole:
            self.check_whole()

    def check_whole(self):
        """One membership for all chunks of a step, and the mean over the samples of just those."""
        trainers = {int(name[6:]): t for name, t in {**self.gone, **self.trainers}.items()}
        makers, cuts = {}, self.cuts_of()
        for work in (w for w in self.works if w.kind != "measure"):
            made = frozenset(worker for worker, _, _ in work.parts)
            assert makers.setdefault(work.step, made) == made, f"step {work.step}: {made}"
            crews = {worker: trainers[worker].shared[work.step] for worker in made}
            seen = [sample for worker in made for sample in part(crews[worker], worker)]
            assert len(seen) == len(set(seen)), "a sample was trained on twice in a step"
            lacks = any(cut <= work.step < cut + self.plan.rules.cut_steps for cut in cuts)
            assert lacks or not made or len(seen) == SAMPLES, f"step {work.step}: not all samples"
            mean = sum(
                weight * len(crews[worker]) / SAMPLES * sum(part(crews[worker], worker))
                for worker, _, weight in work.parts
            )
            assert not seen or math.isclose(mean, sum(seen) / len(seen)), "another mean"

    def cuts_of(self):
        """The first step that each who was lost, or has left, does not count in, as some seat knows
        it."""
        seats = [member.seat for member in self.members.values() if member.seat is not None]
        left = {step for seat in seats for step in seat.roster._left}
        return left | {cut.step for seat in seats for cut in seat._losses._cuts}

    def check_crew(self, name, trainer):
        """Whoever takes part in a step has shared its samples with all who do."""
        for work in (w for w in self.works if w.kind != "measure"):
            made = {worker for worker, _, _ in work.parts}
            if int(name[6:]) in made:
                unknown = made - trainer.shared[work.step] - self.killed
                assert not unknown, f"{name} shared step {work.step} without {unknown}"

    def decisions(self):
        """What each chunk went through, in order."""
        chunks = {}
        for work in self.works:
            chunks.setdefault(work.chunk, []).append(
                (work.kind, work.step, work.parts, str(work.settings), work.scale)
            )
        return chunks
