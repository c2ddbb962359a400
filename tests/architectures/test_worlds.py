"""Members on real sockets and shared memory decide what they decide on the virtual clock.

All members are threads of one process, each with its own loop, sockets and tensors. Where all are
waited for, what is computed is the same in every world. In every mode, what a member of the real
world was told makes machines of the test decide the same, one by one: nothing else decides.
"""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from paceline import spec
from paceline.collectives.context import Context
from paceline.launch import Identity
from paceline.protocol.actions import Ready, Work
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.member import Member
from paceline.protocol.seat import SeatMachine
from paceline.served import loop, setup
from paceline.served.shapes import Exchanged
from paceline.telemetry import StepClock
from tests.predict.test_virtual import MODES, PLACES, decisions, model, run
from tests.protocol.network import Network

WORKERS, STEPS, LAYERS, ELEMENTS = 3, 4, 6, 16 << 10
SECONDS = 60.0


class Heard(Member):
    """A real member that keeps what it was told, what it asked, and what it wanted."""

    def __init__(self, name, world, worker, seat):
        self.world, self.told, self.answers, self.wanted = world, [], [], []
        super().__init__(name, self, worker, seat)

    # What the world tells it.

    def tell(self, *events):
        self.told.append(("tell", events, {}))
        super().tell(*events)

    def receive(self, message, *, for_seat):
        self.told.append(("receive", (message,), {"for_seat": for_seat}))
        super().receive(message, for_seat=for_seat)

    def lose(self, member):
        self.told.append(("lose", (member,), {}))
        super().lose(member)

    def work(self):
        self.told.append(("work", (), {}))
        return super().work()

    def finished(self, work, squared_norms=()):
        self.answers.append(tuple(squared_norms))
        super().finished(work, squared_norms)

    # What it asks of the world, and wants it to do.

    def now(self):
        self.answers.append(self.world.now())
        return self.answers[-1]

    def moves(self, send):
        self.answers.append(self.world.moves(send))
        return self.answers[-1]

    def post(self, to, sends):
        self.wanted.append((to, list(sends)))
        self.world.post(to, sends)

    def do(self, action):
        self.wanted.append(action)
        self.world.do(action)


class Replay:
    """The same told to new machines; the world's answers are those that were given."""

    def __init__(self, heard, plan):
        seat, worker = heard.seat, heard.worker
        self.answers, self.wanted = iter(heard.answers), []
        self.member = Member(
            heard.name,
            self,
            None if worker is None else ExchangeMachine(plan, worker.worker),
            None if seat is None else SeatMachine(plan, seat.seat, assigned=plan.rules.shared),
        )
        for method, given, named in heard.told:
            getattr(self.member, method)(*given, **named)

    def now(self):
        return next(self.answers)

    def moves(self, send):
        return next(self.answers)

    def post(self, to, sends):
        self.wanted.append((to, list(sends)))

    def do(self, action):
        self.wanted.append(action)
        if isinstance(action, Work):
            self.member.finished(action, next(self.answers))


class RealJob:
    """Every worker takes so many steps with gradients of one, and leaves."""

    def __init__(self, options, servers, monkeypatch, *, clips=False):
        self.options, self.servers, self.store = options, servers, HashStore()
        self.clips = clips
        self.plan, self.heard = None, []

        def member(name, world, worker, seat):
            self.heard.append(Heard(name, world, worker, seat))
            return self.heard[-1]

        monkeypatch.setattr(loop, "Member", member)

    @property
    def works(self):
        done = (action for heard in self.heard for action in heard.wanted)
        return [action for action in done if isinstance(action, Work)]

    def context(self, index):
        members = WORKERS + self.servers
        identity = Identity(
            index=index,
            workers=WORKERS,
            servers=self.servers,
            local_index=index,
            local_members=members,
            key="test",
        )
        return Context(
            identity=identity,
            store=self.store,
            clock=StepClock(),
            device=torch.device("cpu"),
            note=lambda text: None,
            deadline_seconds=SECONDS,
        )

    def run(self):
        with ThreadPoolExecutor(WORKERS + self.servers) as threads:
            mains = [self.work] * WORKERS + [self.serve] * self.servers
            running = [threads.submit(main, index) for index, main in enumerate(mains)]
            for ending in running:
                ending.result(SECONDS)
        return self

    def serve(self, index):
        member = setup.set_up_server(self.options, self.context(index))
        member.serve()
        member.close(0.0)

    def work(self, index):
        updates = self.options.update != "worker"
        exchanged = Exchanged(
            names=[f"l{layer}" for layer in range(LAYERS)],
            tensors=[torch.zeros(ELEMENTS) for _ in range(LAYERS)],
            groups=[0] * LAYERS,
            optimizer="SGD" if updates else "",
            settings=[{"lr": 0.5}] if updates else [],
        )
        member = setup.set_up_worker(self.options, self.context(index), exchanged)
        self.plan = member.plan
        chunks, rng = list(member.plan.layout.chunks), random.Random(index)
        for step in range(STEPS):
            rng.shuffle(chunks)
            for chunk in chunks:
                values = torch.ones(chunk.stop - chunk.start)
                ready = Ready(chunk.index, hold=self.clips, mean=not updates)
                member.worker.submit([(ready, [(0, values.numel(), values)])])
            if self.clips:
                norms, _ = member.worker.squared_norms(step)
                assert norms == (ELEMENTS,) * LAYERS
                member.worker.commit(0.5)
            member.worker.wait_all()
        if updates:
            assert len(member.worker.fetch_states()) == len(chunks)
        member.close(SECONDS)


def check_worlds(options, monkeypatch, *, clips=False):
    """Three worlds, one sequence of decisions; returns the real one's."""
    job = RealJob(options, PLACES[options.placement], monkeypatch, clips=clips).run()
    done = [work for work in job.works if work.kind != "measure"]
    applied = Counter((w.chunk, worker, step) for w in done for worker, step, _ in w.parts)
    assert set(applied.values()) == {1}, "a gradient was applied twice"
    if options.waits_for_all:
        virtual = run(job.plan, model(LAYERS, ELEMENTS)[1], STEPS, clips=clips)
        works = [work for world in virtual.members.values() for work in world.works]
        network = Network(random.Random(0), job.plan, STEPS, touches=clips).run()
        assert decisions(job.works) == decisions(works) == network.decisions()
    for heard in job.heard:
        assert Replay(heard, job.plan).wanted == heard.wanted
    if options.mode == "async":
        assert len(applied) == WORKERS * STEPS * len(job.plan.owners)
    return decisions(job.works)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("placement", PLACES)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_decisions_on_real_sockets_are_those_of_the_other_worlds(
    mode, placement, transport, monkeypatch
):
    options = spec.Server(placement=placement, chunk="16KiB", transport=transport, **mode)
    check_worlds(options, monkeypatch)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("placement", PLACES)
def test_so_are_they_where_workers_clip(placement, transport, monkeypatch):
    options = spec.Server(placement=placement, chunk="16KiB", transport=transport)
    for decided in check_worlds(options, monkeypatch, clips=True).values():
        assert [kind for kind, *_ in decided] == ["measure", "apply"] * STEPS
        assert {scale for kind, *_, scale in decided if kind == "apply"} == {0.5}
