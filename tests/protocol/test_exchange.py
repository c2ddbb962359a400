"""Workers and servers on a network that delivers in any order: what must hold in every run.

`Network` feeds the real machines; only the choice of the next event is random. MUTANTS are broken
protocols: each must be caught, or the checks above them prove nothing.
"""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.protocol import (
    Announce,
    Answer,
    Chunk,
    Commit,
    Departed,
    Drop,
    Keep,
    Leave,
    Measure,
    Push,
    Ready,
    Send,
    ServerMachine,
    Update,
    WorkerMachine,
    of_size,
)


def make_chunks(count):
    return [
        Chunk(index=i, flat=0, start=i, stop=i + 1, size_bytes=4, first_use=i, parameters=(i,))
        for i in range(count)
    ]


class Worker:
    """A training loop: gradients in any order, then wait for every weight, then the next step."""

    def __init__(self, machine, chunks, steps, hold):
        self.machine, self.chunks, self.steps_left, self.hold = machine, chunks, steps, hold
        self.unmade, self.measured, self.step, self.committed = set(range(chunks)), set(), 0, False

    @property
    def done(self):
        return self.steps_left == 0

    def can_compute(self):
        return not self.done and bool(self.unmade)

    def settle(self):
        """Begin the next step when all weights are there; True when a commit is due."""
        if self.unmade or self.done:
            return False
        if self.hold and not self.committed and len(self.measured) == self.chunks:
            self.committed = True
            return True
        if not self.machine.outstanding:
            self.steps_left -= 1
            self.step += 1
            self.unmade, self.measured, self.committed = set(range(self.chunks)), set(), False
        return False


class Network:
    """Any message under way may arrive next; whoever can compute may do so next."""

    def __init__(
        self, rng, workers, seats, chunks, steps, *, window, hold=False, colocated=False, **rule
    ):
        worker_class = rule.pop("worker_class", WorkerMachine)
        server_class = rule.pop("server_class", ServerMachine)
        self.rng, self.hold = rng, hold
        self.table = make_chunks(chunks)
        self.owners = [i % seats for i in range(chunks)]
        self.own_seats = [w if colocated and w < seats else None for w in range(workers)]
        self.workers = [
            Worker(
                worker_class(
                    w,
                    self.table,
                    self.owners,
                    window=window,
                    own_seat=self.own_seats[w],
                    declares=rule["mode"] == "quorum",
                ),
                chunks,
                steps,
                hold,
            )
            for w in range(workers)
        ]
        self.servers = [
            server_class(
                [i for i, owner in enumerate(self.owners) if owner == seat],
                of_size(workers),
                **rule,
            )
            for seat in range(seats)
        ]
        self.flight = []
        self.kept, self.summed, self.dropped, self.pushes = set(), Counter(), Counter(), []
        self.updates = []
        self.gone, self.dead = set(), set()

    def run(self):
        while True:
            moves = [("deliver", i) for i in range(len(self.flight))]
            moves += [("compute", w) for w, it in enumerate(self.workers) if it.can_compute()]
            if not moves:
                return self
            kind, index = self.rng.choice(moves)
            if kind == "deliver":
                self.deliver(*self.flight.pop(index))
            else:
                self.compute(index)
            self.settle()

    def settle(self):
        for w, worker in enumerate(self.workers):
            if worker.settle():
                commit = Commit(w, worker.step)
                self.flight += [(("server", seat), commit) for seat in range(len(self.servers))]
            if worker.done and w not in self.gone:
                self.gone.add(w)
                leave = Leave(w, 10**9 if w in self.dead else worker.step)
                self.flight += [(("server", seat), leave) for seat in range(len(self.servers))]

    def compute(self, w):
        worker = self.workers[w]
        chunk = self.rng.choice(sorted(worker.unmade))
        worker.unmade.remove(chunk)
        self.act_worker(w, worker.machine.handle(Ready(chunk, hold=self.hold)))

    def deliver(self, to, message):
        role, index = to
        if role == "worker" and index in self.dead:
            return
        if role == "server":
            self.act_server(self.servers[index].handle(message))
        elif isinstance(message, Measure):
            self.workers[index].measured.add(message.chunk)
        else:
            self.act_worker(index, self.workers[index].machine.handle(message))

    def act_worker(self, w, actions):
        for action in actions:
            if isinstance(action, Send):
                if isinstance(action.message, Push):
                    self.pushes.append(action.message)
                    if action.seat != self.own_seats[w]:
                        self.flight.append((("worker", w), Departed(action.message.chunk)))
                self.flight.append((("server", action.seat), action.message))

    def act_server(self, actions):
        for action in actions:
            match action:
                case Keep(push):
                    key = (push.chunk, push.worker)
                    assert key not in self.kept, "a gradient overwrites one not yet summed"
                    self.kept.add(key)
                case Drop(push):
                    self.kept.discard((push.chunk, push.worker))
                    self.dropped[push.worker, push.chunk] += 1
                case Announce(chosen):
                    self.flight += [(("worker", w), chosen) for w in range(len(self.workers))]
                case Update(chunk, _, parts):
                    assert abs(sum(weight for _, weight in parts) - 1) < 1e-9
                    self.updates.append(action)
                    for worker, _ in parts:
                        self.kept.remove((chunk, worker))
                        self.summed[worker, chunk] += 1
                case Measure():
                    self.flight += [(("worker", w), action) for w in range(len(self.workers))]
                case Answer():
                    self.flight.append((("worker", action.worker), action))

    def check_ended(self, steps):
        assert not self.flight
        assert all(worker.done for worker in self.workers), "someone waits for ever"
        assert not self.kept, "a gradient was taken and never summed"
        for w in range(len(self.workers)):
            for chunk in range(len(self.table)):
                counted = self.summed[w, chunk] + self.dropped[w, chunk]
                assert counted == steps, f"worker {w} chunk {chunk}: {counted} of {steps}"


class BoundedNetwork(Network):
    """With staleness a worker may have several gradients of one chunk waiting, one a step."""

    def act_server(self, actions):
        for action in actions:
            match action:
                case Keep(push):
                    assert (push.chunk, push.worker, push.step) not in self.kept
                    self.kept.add((push.chunk, push.worker, push.step))
                case Update(chunk, step, parts):
                    self.updates.append(action)
                    for worker, _ in parts:
                        self.kept.remove((chunk, worker, step))
                        self.summed[worker, chunk] += 1
                case Answer():
                    self.flight.append((("worker", action.worker), action))


sizes = st.tuples(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.integers(1, 4)
)  # workers, seats, chunks, steps
windows = st.sampled_from([None, 1, 2])
randoms = st.randoms(use_true_random=False)


def check_sync(network, workers, steps):
    network.check_ended(steps)
    everyone = tuple(range(workers))
    for update in network.updates:
        assert tuple(worker for worker, _ in update.parts) == everyone
    per_chunk = Counter(update.chunk for update in network.updates)
    assert set(per_chunk.values()) == {steps}
    assert all(push.step == push.version for push in network.pushes)


@settings(max_examples=80, deadline=None)
@given(rng=randoms, size=sizes, window=windows, hold=st.booleans(), colocated=st.booleans())
def test_sync_sums_every_worker_once_a_step_in_any_order(rng, size, window, hold, colocated):
    workers, _, _, steps = size
    network = Network(rng, *size, window=window, hold=hold, colocated=colocated, mode="sync").run()
    check_sync(network, workers, steps)


@settings(max_examples=60, deadline=None)
@given(rng=randoms, size=sizes, window=windows, staleness=st.integers(0, 3))
def test_bounded_never_exceeds_its_staleness(rng, size, window, staleness):
    workers, _, _, steps = size
    network = BoundedNetwork(rng, *size, window=window, mode="bounded", staleness=staleness).run()
    network.check_ended(steps)
    assert max(push.step - push.version for push in network.pushes) <= staleness
    measured = sum((sum(s.staleness.values(), Counter()) for s in network.servers), Counter())
    assert max(measured) <= staleness
    if staleness == 0:
        check_sync(network, workers, steps)


def test_bounded_lets_a_worker_run_ahead():
    ahead = 0
    for seed in range(20):
        rng = random.Random(seed)
        network = BoundedNetwork(rng, 3, 1, 2, 4, window=None, mode="bounded", staleness=2).run()
        ahead = max(ahead, max(push.step - push.version for push in network.pushes))
    assert ahead == 2


@settings(max_examples=60, deadline=None)
@given(rng=randoms, size=sizes, window=windows)
def test_async_applies_every_gradient_by_itself(rng, size, window):
    network = Network(rng, *size, window=window, mode="async").run()
    network.check_ended(size[3])
    assert all(len(update.parts) == 1 for update in network.updates)
    assert not network.dropped


@settings(max_examples=60, deadline=None)
@given(rng=randoms, size=sizes, window=windows, data=st.data())
def test_quorum_counts_late_gradients_and_loses_none(rng, size, window, data):
    workers, _, _, steps = size
    quorum = data.draw(st.integers(1, workers))
    network = Network(rng, *size, window=window, mode="quorum", quorum=quorum).run()
    network.check_ended(steps)
    assert sum(network.dropped.values()) == sum(sum(s.late.values()) for s in network.servers)
    told = sum(worker.machine.late_chunks for worker in network.workers)
    assert told == sum(network.dropped.values()), "a worker was not told that it was late"
    if quorum == workers:
        assert not network.dropped
    whose = {}
    for update in network.updates:
        chosen = whose.setdefault(update.step, update.parts)
        assert update.parts == chosen, "chunks of one step come from different workers"


def test_quorum_does_drop_in_some_run():
    network = Network(random.Random(3), 4, 1, 3, 4, window=2, mode="quorum", quorum=2).run()
    assert network.dropped


@given(rng=randoms, steps=st.integers(1, 3), lost=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_a_lost_worker_holds_nobody_up(rng, steps, lost):
    network = Network(rng, 3, 2, 4, steps, window=1, mode="sync")
    for _ in range(rng.randrange(12)):
        able = [w for w, it in enumerate(network.workers) if it.can_compute()]
        if able:
            network.compute(rng.choice(able))
        if network.flight:
            network.deliver(*network.flight.pop(rng.randrange(len(network.flight))))
        network.settle()
    network.workers[lost].steps_left = 0
    network.dead.add(lost)
    network.settle()
    network.run()
    assert all(worker.done for worker in network.workers)


class OpensOnAnswer(WorkerMachine):
    """The window opens only when the summed result returns: deadlocks (DESIGN section 7)."""

    def handle(self, event):
        if isinstance(event, Departed):
            return []
        actions = super().handle(event)
        return (
            [*actions, *super().handle(Departed(event.chunk))]
            if isinstance(event, Answer)
            else actions
        )


class ForgetsAChunk(WorkerMachine):
    def _fill(self):
        actions = super()._fill()
        return actions[:-1] if self.step > 1 else actions


class ClosesEarly(ServerMachine):
    def _complete(self, index, step):
        return len(step.pushes) >= max(1, len(self.members.workers) - 1)


class AnswersAtOnce(ServerMachine):
    def _push(self, push):
        actions = super()._push(push)
        answered = any(isinstance(a, Answer) for a in actions)
        return actions if answered else [*actions, Answer(push.worker, push.chunk, push.version)]


MUTANTS = [
    {"worker_class": OpensOnAnswer},
    {"worker_class": ForgetsAChunk},
    {"server_class": ClosesEarly},
    {"server_class": AnswersAtOnce},
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: next(iter(m.values())).__name__)
def test_a_broken_protocol_is_caught(mutant):
    def caught(seed):
        try:
            network = Network(random.Random(seed), 3, 2, 6, 3, window=1, mode="sync", **mutant)
            check_sync(network.run(), 3, 3)
        except (AssertionError, ExchangeError, KeyError):
            return True
        return False

    assert any(caught(seed) for seed in range(30))


def sends(actions):
    return [action.message.chunk for action in actions if isinstance(action, Send)]


def test_the_most_urgent_chunk_goes_next_whoever_serves_it():
    """One window for all seats: a link carries chunks in the order in which they were dealt."""
    machine = WorkerMachine(0, make_chunks(6), [0, 1, 0, 1, 0, 1], window=1)
    assert [sends(machine.handle(Ready(chunk))) for chunk in (5, 4, 3, 0, 1, 2)] == [
        [5],
        [4],
        [],
        [],
        [],
        [],
    ]
    assert [sends(machine.handle(Departed(chunk))) for chunk in (5, 0, 4)] == [[0], [1], [2]]


def test_while_gradients_are_made_the_newest_stretch_goes_first_in_the_order_made():
    """So that workers a moment apart send the same chunks, and servers can answer them."""
    machine = WorkerMachine(0, make_chunks(12), [0, 1] * 6, window=1)
    made = [sends(machine.handle(Ready(chunk))) for chunk in (11, 10, 9, 8, 7, 6)]
    assert made == [[11], [10], [], [], [], []]
    assert [sends(machine.handle(Departed(chunk))) for chunk in (11, 10, 7)] == [[7], [6], [9]]
    for chunk in range(5, -1, -1):
        assert sends(machine.handle(Ready(chunk))) == []
    assert [sends(machine.handle(Departed(chunk))) for chunk in (6, 9)] == [[0], [1]]


def test_what_stays_in_this_process_does_not_wait_for_the_link():
    machine = WorkerMachine(0, make_chunks(4), [0, 1, 0, 1], window=1, own_seat=0)
    assert [sends(machine.handle(Ready(chunk))) for chunk in (3, 1, 2, 0)] == [[3], [1], [2], [0]]
    machine = WorkerMachine(0, make_chunks(4), [0, 1, 0, 1], window=1)
    assert [sends(machine.handle(Ready(chunk))) for chunk in (3, 1, 2, 0)] == [[3], [1], [], []]
