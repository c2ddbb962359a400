"""Workers that serve are lost, at any moment: the others go on, with its gradients or without.

`Network` checks that nothing is lost that anybody was told of, that weights and state belong
together, and that a step counts the lost one in all chunks or in none.
"""

import random

import pytest

from paceline.errors import ExchangeError
from paceline.protocol.actions import Adopt, Drop, Keep, Lost, Ready, Send
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.homes import Homes
from paceline.protocol.messages import Cut, Gathered, Handed, Holding, Orphans, Push, Rescue, Spare
from paceline.protocol.seat import SeatMachine
from tests.protocol.network import Network, make

STEPS = 5


def begun(seed, workers, servers, **script):
    """A job in which every chunk was updated, and everybody was told."""
    chunks, more = 2 * workers, {"placement": "optimal"} if servers else {}
    plan = make(workers, servers, chunks, whole=True, mode="sync", **more)
    network = Network(random.Random(seed), plan, STEPS, **script)
    everything = [(name, chunk) for name in network.trainers for chunk in range(chunks)]
    while not all(network.weights.get(key) for key in everything):
        network.happen()
    return network


@pytest.mark.parametrize(
    "script",
    [{}, {"touches": True}, {"mean": True}, {"schedule": True}, {"twice": True}, {"fetches": True}],
)
@pytest.mark.parametrize(("workers", "servers"), [(2, 0), (3, 0), (3, 1)])
def test_a_job_goes_on_wherever_one_is_lost(workers, servers, script):
    """In the last step too, and when some have finished."""
    lost = 0
    for seed in range(16):
        network = begun(seed, workers, servers, **script)
        for _ in range(network.rng.randrange(200)):
            network.happen()
        able = [t.machine.worker for t in network.trainers.values() if not t.done]
        able = [worker for worker in able if network.can_lose(worker)]
        if not able:
            continue
        lost += 1
        network.kill(network.rng.choice(able))
        network.run().check_ended()
        assert set(network.versions.values()) == {STEPS}
        assert all(trainer.machine.step == STEPS for trainer in network.trainers.values())
    assert lost > 5


def test_one_after_the_other_until_one_is_left():
    for seed in range(20):
        network = begun(seed, 4, 0)
        for victim in network.rng.sample(range(4), 3):
            steps = min(trainer.machine.step for trainer in network.trainers.values())
            if steps >= STEPS - 1:
                break
            network.kill(victim)
            # As long as two steps take: what was taken in is updated, and has another home.
            while not all(
                trainer.done or trainer.machine.step > steps + 2
                for trainer in network.trainers.values()
            ):
                network.happen()
        network.run().check_ended()


PLAN = make(3, 0, 6, whole=True, mode="sync")


def test_what_stays_in_the_process_goes_to_the_seat_that_would_take_it_in():
    homes = Homes(PLAN)
    assert set(homes.heirs) == set(range(6))
    assert all(heir != PLAN.owners[chunk] for chunk, heir in homes.heirs.items())
    assert homes.needed == {0, 1, 2}
    worker = ExchangeMachine(PLAN, 1)
    mine, *_ = PLAN.chunks_of(1)
    local, spare = worker.handle(Ready(mine))
    assert (local.to, type(local.message)) == ("worker1", Push)
    assert spare == Send(f"worker{homes.heirs[mine]}", Spare(local.message), mine, seat=True)
    others, *_ = PLAN.chunks_of(2)
    (pushed,) = worker.handle(Ready(others))
    assert (pushed.to, type(pushed.message)) == ("worker2", Push)


def pushes(worker, step=0):
    return [Push(worker, chunk, step, step) for chunk in range(6)]


def seat_with(step, *, spares):
    """Seat 0 with all gradients of a step, and perhaps what it keeps for others."""
    seat, heirs = SeatMachine(PLAN, 0), Homes(PLAN).heirs
    told = []
    for worker in range(3):
        for push in pushes(worker, step):
            if PLAN.owners[push.chunk] == 0:
                told += seat.handle(push)
            elif spares and PLAN.owners[push.chunk] == worker and heirs[push.chunk] == 0:
                told += seat.handle(Spare(push))
    return seat, [action.message for action in told if isinstance(action, Send)]


def test_a_seat_has_all_of_a_step_when_it_has_the_spares_too():
    _, told = seat_with(0, spares=False)
    assert told == []
    _, told = seat_with(0, spares=True)
    assert told == [Gathered(0, 0, (0, 1, 2))] * 3


def orphans(worker, owners, sealed=0):
    """What a worker tells seat 0 when worker 2 was lost."""
    mine = [c for c in range(6) if PLAN.owners[c] == 2 and owners[c] == 0]
    holdings = tuple(Holding(c, 0, True, False, 0) for c in mine)
    return Orphans(worker, (2,), holdings, sealed=sealed)


@pytest.mark.parametrize(("cut", "counts"), [(1, True), (0, False)])
def test_a_spare_counts_in_a_sealed_step_and_in_no_other(cut, counts):
    seat, _ = seat_with(0, spares=True)
    homes = Homes(PLAN)
    homes.lose(2)
    for worker in (0, 1):
        told = seat.handle(orphans(worker, homes.owners, cut))
        assert not [a for a in told if isinstance(a, Send) and isinstance(a.message, Rescue)]
    told = seat.handle(Cut((2,), cut))
    asked = [a.message for a in told if isinstance(a, Send) and isinstance(a.message, Rescue)]
    (chunk,) = [rescue.chunk for rescue in asked]
    for worker in (0, 1):
        assert seat.handle(Push(worker, chunk, 0, 0)) == [Keep(Push(worker, chunk, 0, 0))]
    told = seat.handle(Handed(0, chunk, 0))
    assert told[0] == Adopt(Handed(0, chunk, 0))
    assert (Drop(chunk, 2, 0) in told) != counts
    made = []
    while (work := seat.take()) is not None:
        made.append(work)
        seat.done(work)
    crews = {work.chunk: tuple(worker for worker, _, _ in work.parts) for work in made}
    if counts:
        assert crews == dict.fromkeys([*PLAN.chunks_of(0), chunk], (0, 1, 2))
    else:
        assert crews == {}, "the others have not said that they have it without the lost one"


def test_another_loss_before_all_is_settled_stops_the_job():
    worker = ExchangeMachine(PLAN, 0)
    seat, _ = seat_with(0, spares=True)
    homes = Homes(PLAN)
    homes.lose(2)
    seat.handle(orphans(0, homes.owners))
    with pytest.raises(ExchangeError, match="worker1 was lost before all that worker2 had"):
        seat.handle(Lost("worker1"))
    worker.handle(Lost("worker2"))
    assert worker._owners == homes.owners
