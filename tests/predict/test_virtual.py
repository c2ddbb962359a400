"""The machines on a virtual clock decide as on any network, and take the time they must.

A prediction is about the code that runs only if both hold.
"""

import random
import sys
from pathlib import Path

import pytest

from paceline import spec
from paceline.protocol.chunks import ParameterSize
from paceline.protocol.placement import exchange_seconds
from paceline.protocol.plan import Shape, make_plan
from paceline.protocol.seat import SeatMachine
from paceline.spec.profile import Layer
from tests.protocol.network import Network

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import ideal_links
from ideal_links import step_ends

RATE = 1e6
PLACES = {"dedicated": 2, "colocated": 0, "optimal": 1}
MODES = [
    {"mode": "sync"},
    {"mode": "sync", "update": "worker"},
    {"mode": "bounded", "staleness": 2},
    {"mode": "quorum", "quorum": 2},
    {"mode": "async"},
]


def model(layers=6, elements=16 << 10, seconds=1e-6):
    sizes = [ParameterSize(name=f"l{i}", elements=elements) for i in range(layers)]
    times = [
        Layer(
            name=size.name,
            forward_seconds=seconds,
            backward_seconds=2 * seconds,
            parameter_bytes=size.size_bytes,
        )
        for size in sizes
    ]
    return sizes, times


def plan_of(sizes, placement, workers=3, **options):
    shape = Shape(workers=workers, servers=PLACES[placement])
    return make_plan(sizes, spec.Server(placement=placement, chunk="16KiB", **options), shape)


def run(plan, times, steps, **options):
    return ideal_links.run(plan, times, steps, RATE, **options)


def decisions(works):
    """What each chunk went through, in order."""
    chunks = {}
    for work in works:
        decided = work.kind, work.step, work.parts, str(work.settings), work.scale
        chunks.setdefault(work.chunk, []).append(decided)
    return chunks


@pytest.mark.parametrize("placement", PLACES)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_every_mode_and_placement_ends_with_every_step_done(mode, placement):
    sizes, times = model()
    job = run(plan_of(sizes, placement, **mode), times, 4, stretch=uneven)
    assert [len(ends) for ends in step_ends(job)] == [4, 4, 4]
    seats = [world.member.seat for world in job.members.values() if world.member.seat]
    assert all(seat.over for seat in seats)


def uneven(worker, layer, seconds):
    return seconds * (1 + worker)


@pytest.mark.parametrize("placement", PLACES)
@pytest.mark.parametrize("mode", MODES[:3], ids=lambda mode: "-".join(map(str, mode.values())))
def test_decisions_are_those_of_any_other_network(mode, placement):
    sizes, times = model()
    plan = plan_of(sizes, placement, **mode)
    job = run(plan, times, 4, stretch=uneven)
    virtual = decisions([work for world in job.members.values() for work in world.works])
    for seed in range(3):
        network = Network(random.Random(seed), plan, 4).run()
        network.check_ended()
        assert network.decisions() == virtual


@pytest.mark.parametrize("placement", PLACES)
def test_with_nothing_to_compute_a_step_takes_the_closed_form(placement):
    sizes, times = model(layers=24, elements=64 << 10)
    plan = plan_of(sizes, placement)
    ends = [max(moments) for moments in zip(*step_ends(run(plan, times, 8)), strict=True)]
    seconds = (ends[-1] - ends[2]) / 5
    limit = exchange_seconds(placement, 3, PLACES[placement], plan.layout.size_bytes, RATE)
    assert limit <= seconds * (1 + 1e-6)
    # Links are divided by what is queued, not by all that there is to carry: `optimal` pays.
    assert seconds <= (1.15 if placement == "optimal" else 1.05) * limit


def test_what_servers_cost_is_in_the_step():
    sizes, times = model()
    plan = plan_of(sizes, "dedicated")
    free = step_ends(run(plan, times, 4))[0][-1]
    costs = {"sum_seconds_per_byte": 1 / RATE, "update_seconds_per_byte": 2 / RATE}
    assert step_ends(run(plan, times, 4, **costs))[0][-1] > 1.5 * free
    slower = step_ends(run(plan, times, 4, message_seconds=0.1))[0][-1]
    assert slower > free + 0.5


class AnswersWhenTheStepIsWhole(SeatMachine):
    """Holds every answer back until all its chunks have seen the step."""

    def _answer(self, slot):
        if len({other.version for other in self._slots.values()}) > 1:
            return []
        found = [super(AnswersWhenTheStepIsWhole, self)._answer(s) for s in self._slots.values()]
        return [action for actions in found for action in actions]


def test_another_protocol_gives_another_prediction(monkeypatch):
    sizes, times = model(layers=12, elements=16 << 10, seconds=0.05)
    plan = plan_of(sizes, "dedicated")
    before = step_ends(run(plan, times, 5))[0][-1]
    monkeypatch.setattr("paceline.predict.virtual.SeatMachine", AnswersWhenTheStepIsWhole)
    assert step_ends(run(plan, times, 5))[0][-1] > 1.05 * before


def test_the_same_job_twice():
    sizes, times = model()
    plan = plan_of(sizes, "optimal")
    assert step_ends(run(plan, times, 4)) == step_ends(run(plan, times, 4))
