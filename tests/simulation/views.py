"""A job that changes its views, on a virtual network: workers, and the coordinator, may fail.

An exchange ends on a worker once all of its group have entered it, as a sum does; a worker that
fails may have entered it before. The result of an exchange is the group that made it: all workers
that remain must have the same result for each exchange, and each exchange once.
"""

import random

import msgspec

from paceline.protocol.actions import Lost
from paceline.protocol.coordinating import Coordinator
from paceline.protocol.views import (
    COORDINATOR,
    Change,
    Participant,
    Position,
)

STEPS = 6


class Worker:
    def __init__(self, rank, machine, *, joins):
        self.rank, self.machine, self.joins = rank, machine, joins
        self.history = []
        """The result of each exchange, one for each step."""
        self.group, self.to_enter = (), []
        self.seen = None
        """The newest view that it has taken."""
        self.is_inside = self.is_done = self.has_state = False
        self.behind_of = None
        """The view whose source gives it the result that it lacks."""
        self.stays = STEPS
        """It leaves after this step, if others have more to do or not."""

    @property
    def step(self):
        return len(self.history)

    @property
    def next_group(self):
        """The next view with workers that join; it holds from its first step on."""
        return self.to_enter[0] if self.to_enter else None

    @property
    def is_over(self):
        return self.machine.end is not None


class World:
    def __init__(self, seed, *, coordinator=Coordinator, participant=Participant, kills_it=True):
        self.chance = chance = random.Random(seed)
        count = chance.randint(1, 5)
        self.make = participant
        self.coordinator = coordinator(count)
        self.workers, self.alive = {}, set()
        self.queues, self.unseen = {}, set()
        self.entered, self.opened = {}, {}
        self.newest = count
        for rank in range(count):
            self.add(rank, joins=False)
        at_once = chance.random() < 0.3
        kinds = ["kill"] * chance.randint(0, count) + ["join"] * chance.randint(0, 3)
        kinds += ["kill coordinator"] * (kills_it and chance.random() < 0.1)
        chance.shuffle(kinds)
        when = sorted(chance.randrange(6 if at_once else 150) for _ in kinds)
        start = 4 * count if chance.random() < 0.9 else 0
        self.troubles = [(start + after, kind) for after, kind in zip(when, kinds, strict=True)]
        self.is_cut_off = False
        self.let_in, self.numbers = set(), set()
        """Workers that some view let in; numbers of the changes that were asked for."""
        self.announced = 0
        """Views after the first."""

    def add(self, rank, *, joins):
        self.workers[rank] = Worker(rank, self.make(rank, f"host{rank % 2}"), joins=joins)
        if joins and self.chance.random() < 0.4:
            self.workers[rank].stays = self.chance.randint(1, STEPS)
        self.alive.add(rank)
        self.send(rank, COORDINATOR, self.workers[rank].machine.enroll())

    def send(self, source, to, actions):
        for action in actions:
            where = to or int(action.to.removeprefix("worker"))
            self.queues.setdefault((source, where), []).append(action.message)

    # What happens.

    def run(self):
        for number in range(20_000):
            while self.troubles and number >= self.troubles[0][0]:
                self.happen(self.troubles.pop(0)[1])
            if all(self.workers[rank].is_over for rank in self.alive) and not self.troubles:
                return self
            choices = list(self.possible())
            if not choices and self.troubles:
                self.happen(self.troubles.pop(0)[1])
                continue
            assert choices, "a worker waits for ever"
            act, *arguments = self.chance.choice(choices)
            act(*arguments)
        raise AssertionError("the job does not come to an end")

    def happen(self, kind):
        able = sorted(rank for rank in self.alive if not self.workers[rank].is_over)
        if kind == "join":
            if not self.is_cut_off:
                self.add(self.newest, joins=True)
                self.newest += 1
        elif kind == "kill coordinator":
            self.is_cut_off = True
            self.unseen = {(rank, COORDINATOR) for rank in self.alive}
            self.lose(COORDINATOR)
        elif len(able) > 1:
            self.kill(self.chance.choice(able))

    def kill(self, rank):
        self.alive.discard(rank)
        self.lose(rank)
        if not self.is_cut_off:
            self.unseen.add((COORDINATOR, rank))

    def lose(self, member):
        """What it had not sent in full is lost with it, and what was on its way to it."""
        for (source, to), words in self.queues.items():
            if source == member:
                del words[self.chance.randint(0, len(words)) :]
            if to == member:
                words.clear()

    def possible(self):
        for rank in sorted(self.alive):
            worker = self.workers[rank]
            if not worker.is_over:
                yield from self.work(worker)
        for (source, to), words in self.queues.items():
            lives = to in self.alive or (to == COORDINATOR and not self.is_cut_off)
            if words and lives:
                yield self.deliver, source, to
        for who, gone in sorted(self.unseen, key=str):
            lives = who in self.alive or (who == COORDINATOR and not self.is_cut_off)
            if lives and not self.queues.get((gone, who)):
                yield self.notice, who, gone

    def work(self, worker):
        machine = worker.machine
        if machine.view is not worker.seen:
            yield self.take_view, worker
        elif machine.change is not None and not machine.has_reported:
            yield from self.stopping(worker)
        elif machine.change is not None and (machine.must_stop or not worker.is_inside):
            return  # it waits for the next view
        elif worker.behind_of is not None:
            source = self.workers[worker.behind_of.source]
            has_taken_it = source.seen and source.seen.number >= worker.behind_of.number
            if source.rank in self.alive and has_taken_it:
                yield self.take_result, worker, source
        elif not worker.has_state:
            source = self.workers[worker.next_group.source] if worker.next_group else None
            if source and source.rank in self.alive and self.is_open(worker.next_group):
                yield self.take_state, worker, source
        elif worker.next_group and worker.step >= worker.next_group.first_step:
            yield from self.opening(worker)
        elif worker.is_inside:
            if self.entered[worker.group, worker.step] >= set(worker.group):
                yield self.end_exchange, worker, worker.group
        elif worker.step < worker.stays and not worker.is_done:
            yield self.enter, worker
        elif not worker.is_done:
            yield self.finish, worker

    def stopping(self, worker):
        """A failure stops it anywhere; a join where it waits for others, or between two steps."""
        yield self.report, worker
        may_go_on = worker.is_inside and not worker.machine.must_stop
        if may_go_on and self.entered[worker.group, worker.step] >= set(worker.group):
            yield self.end_exchange, worker, worker.group

    def report(self, worker):
        started = worker.is_inside
        exchanges = worker.step if worker.has_state else -1
        following = worker.step + started
        position = Position(
            worker.rank,
            exchanges=exchanges,
            step=worker.step,
            next_step=following,
            entry_step=following,
        )
        self.tell(worker, position)

    def take_view(self, worker):
        view = worker.seen = worker.machine.view
        assert worker.rank in view.participants, "a view of others"
        assert len(view.hosts) == len(view.participants)
        before = worker.group or view.participants + view.failed
        strangers = set(view.failed) - set(before) - self.let_in
        assert not strangers, f"workers that were no participants have failed: {strangers}"
        self.let_in.update(view.joined)
        if view.joined:
            worker.to_enter = [*(worker.to_enter if worker.has_state else ()), view]
        elif view.redo or (not worker.group and not worker.joins):
            worker.has_state |= not worker.joins
            worker.group, worker.to_enter = view.participants, []
            worker.is_inside = False
            worker.behind_of = view if worker.rank in view.behind else None

    def take_result(self, worker, source):
        worker.behind_of = None
        assert len(source.history) > worker.step, "its source lacks the result too"
        self.end_exchange(worker, source.history[worker.step])

    def opening(self, worker):
        """All participants of the view come to its first step before any goes on."""
        view = worker.next_group
        here = self.opened.setdefault(view.number, set())
        if worker.rank not in here:
            yield here.add, worker.rank
        elif self.is_open(view):
            yield self.enter_view, worker

    def is_open(self, view):
        here = self.opened.get(view.number, set())
        return here >= set(view.participants) - set(view.joined)

    def enter_view(self, worker):
        worker.group = worker.to_enter.pop(0).participants

    def take_state(self, worker, source):
        view = worker.next_group
        worker.history = source.history[: view.first_step]
        worker.has_state = True
        assert worker.step == view.first_step, "its source was at another step"
        self.enter_view(worker)
        self.send(worker.rank, COORDINATOR, worker.machine.confirm(worker.step))

    def enter(self, worker):
        worker.is_inside = True
        self.entered.setdefault((worker.group, worker.step), set()).add(worker.rank)

    def end_exchange(self, worker, result):
        worker.history.append(result)
        worker.is_inside = False

    def finish(self, worker):
        worker.is_done = True
        done = Position(worker.rank, exchanges=worker.step, is_done=True, step=worker.step)
        self.tell(worker, msgspec.structs.replace(done, leaves=worker.joins))

    def deliver(self, source, to):
        message = self.queues[source, to].pop(0)
        if to == COORDINATOR:
            before = self.coordinator.view
            self.send(COORDINATOR, None, self.coordinator.handle(message))
            self.announced += before is not None and before is not self.coordinator.view
        else:
            self.tell(self.workers[to], message)

    def notice(self, who, gone):
        self.unseen.discard((who, gone))
        if who == COORDINATOR:
            self.send(COORDINATOR, None, self.coordinator.handle(Lost(f"worker{gone}")))
        else:
            self.tell(self.workers[who], Lost(COORDINATOR))

    def tell(self, worker, event):
        if isinstance(event, Change):
            self.numbers.add(event.view)
        actions = worker.machine.handle(event)
        if not self.is_cut_off:
            self.send(worker.rank, COORDINATOR, actions)

    # What must hold in the end.

    def check(self):
        ends = {self.workers[rank].machine.end.why for rank in self.alive}
        if self.is_cut_off:
            ends = {
                why for why in ends if "lost the connection to the job's coordinator" not in why
            }
        if self.coordinator.view is None:
            assert all("failed before all workers had met" in why for why in ends)
        else:
            stateless = "no participant with the model's state remains"
            others = [why for why in ends if why and stateless not in why]
            assert not others, others
        finished = {
            rank
            for rank in self.alive
            if self.workers[rank].is_done and self.workers[rank].stays == STEPS
        }
        for rank in self.alive:
            worker = self.workers[rank]
            if not (worker.machine.end.why or worker.joins):
                assert worker.is_done, f"worker{rank} was ended early"
        histories = {tuple(self.workers[rank].history) for rank in finished}
        assert len(histories) <= 1, f"different results: {histories}"
        for history in histories:
            assert len(history) == STEPS, "a step was left out or made twice"
            for step, group in enumerate(history):
                assert group, f"step {step} has no result"


def simulate(seed, **how):
    world = World(seed, **how).run()
    world.check()
    return world


def failing(seeds, **how):
    """Seeds whose job does not hold what every job must, with what it did not hold."""
    found = {}
    for seed in seeds:
        try:
            simulate(seed, **how)
        except (AssertionError, KeyError, IndexError, TypeError) as error:
            found[seed] = error
    return found
