"""A pipeline's machines: torch's schedules are the oracle of their order; nobody waits in vain."""

import random

import pytest

from paceline.protocol.partition import in_flight
from paceline.protocol.pipeline import (
    Came,
    Compute,
    Computed,
    Hand,
    Pipe,
    PipelineMachine,
    Turn,
    idle_fraction,
)

SHAPES = [(2, 2), (2, 4), (3, 6), (4, 4), (4, 8), (4, 3), (4, 10)]
"""Workers and micro-batches."""

TORCH = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}


def _pipes():
    for workers, microbatches in SHAPES:
        common = {"workers": workers, "microbatches": microbatches}
        yield Pipe(schedule="gpipe", **common)
        if microbatches >= workers:  # torch wants as many
            yield Pipe(schedule="1f1b", **common)
        for loops in (2, 3):
            yield Pipe(schedule="interleaved", **common, loops=loops)


PIPES = [*_pipes()]


def in_torch(pipe):
    """Each worker's turns in torch's own order."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    loops = pipe.loops if pipe.schedule == "interleaved" else None
    ordered = get_schedule_ops(TORCH[pipe.schedule], pipe.workers, pipe.microbatches, loops)
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    return [
        [
            Turn(kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None and action.computation_type.name in kinds
        ]
        for actions in ordered
    ]


@pytest.mark.parametrize("pipe", PIPES, ids=str)
def test_turns_are_taken_in_the_order_of_torchs_schedules(pipe):
    for place, expected in enumerate(in_torch(pipe)):
        found = pipe.turns(place)
        if pipe.schedule == "1f1b":  # torch draws the last worker's micro-batches from 1
            expected = [Turn(t.kind, t.stage, 0) for t in expected]
            found = [Turn(t.kind, t.stage, 0) for t in found]
        assert found == expected


@pytest.mark.parametrize("pipe", PIPES, ids=str)
def test_every_turn_is_taken_once_whatever_comes_first(pipe):
    chance = random.Random(str(pipe))
    machines = [PipelineMachine(pipe, place) for place in range(pipe.workers)]
    waiting, taken = [], []

    def act(place, actions):
        for action in actions:
            match action:
                case Compute(turn):
                    taken.append(turn)
                    waiting.append((place, Computed(turn)))
                case Hand(to, turn):
                    waiting.append((to, Came(turn)))

    for place, machine in enumerate(machines):
        act(place, machine.begin())
    while waiting:
        place, event = waiting.pop(chance.randrange(len(waiting)))
        act(place, machines[place].handle(event))
    assert all(machine.is_over for machine in machines)
    stages, parts = range(pipe.stages), range(pipe.microbatches)
    assert sorted(taken, key=repr) == sorted(
        (Turn(kind, s, m) for kind in ("forward", "backward") for s in stages for m in parts),
        key=repr,
    )


def test_equal_stages_idle_as_the_formula_says():
    for workers, parts in SHAPES:
        formula = (workers - 1) / (parts + workers - 1)
        for schedule in ("gpipe", "1f1b"):
            pipe = Pipe(schedule=schedule, workers=workers, microbatches=parts)
            cost = {"forward": 1.0, "backward": 2.0}
            assert idle_fraction(pipe, lambda turn, c=cost: c[turn.kind]) == pytest.approx(formula)


def test_more_stages_on_each_worker_idle_less():
    plain = Pipe(schedule="1f1b", workers=4, microbatches=8)
    looped = Pipe(schedule="interleaved", workers=4, microbatches=8, loops=2)
    assert idle_fraction(looped, lambda turn: 0.5) < idle_fraction(plain, lambda turn: 1.0)


@pytest.mark.parametrize("pipe", PIPES, ids=str)
def test_cutting_reckons_with_as_many_micro_batches_as_wait_in_memory(pipe):
    held, most = [0] * pipe.stages, [0] * pipe.stages
    for turns in in_torch(pipe):
        for turn in turns:
            held[turn.stage] += 1 if turn.kind == "forward" else -1
            most[turn.stage] = max(most[turn.stage], held[turn.stage])
    assert [in_flight(pipe, stage) for stage in range(pipe.stages)] == most
