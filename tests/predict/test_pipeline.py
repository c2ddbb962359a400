"""A predicted pipeline takes what the closed forms say, and what torch's order of turns takes."""

import json
import random

import pytest

from paceline import spec
from paceline.cli import main
from paceline.errors import SpecError
from paceline.predict.answer import predict, simulate
from paceline.predict.pipeline_step import run_turns
from paceline.predict.timeline import Timeline
from paceline.protocol.pipeline import Pipe
from tests.protocol.test_pipeline import PIPES, SHAPES, in_torch

COST = {"forward": 1.0, "backward": 2.0}


def experiment(text="pipeline", workers=4, link="100gbit", **changes):
    return spec.replace(
        spec.Experiment(workload=spec.Workload(data="synthetic")),
        architecture=spec.parse_architecture(text),
        workers=workers,
        link=link,
        engine="predict",
        **{"model": "resnet50", "device": "v100", "batch": 64, **changes},
    )


@pytest.mark.parametrize(("workers", "parts"), SHAPES)
def test_equal_stages_take_the_closed_forms(workers, parts):
    whole = COST["forward"] + COST["backward"]
    for schedule in ("gpipe", "1f1b"):
        pipe = Pipe(schedule=schedule, workers=workers, microbatches=parts)
        found = run_turns(pipe, lambda turn: COST[turn.kind])
        assert found.seconds == pytest.approx((parts + workers - 1) * whole, rel=0.01)
        assert found.idle_fraction == pytest.approx((workers - 1) / (parts + workers - 1), rel=0.01)
    if parts % workers == 0:
        pipe = Pipe(schedule="interleaved", workers=workers, microbatches=parts, loops=2)
        found = run_turns(pipe, lambda turn: COST[turn.kind] / 2)
        assert found.seconds == pytest.approx((parts + (workers - 1) / 2) * whole, rel=0.01)


@pytest.mark.parametrize("pipe", [p for p in PIPES if p.schedule != "1f1b"], ids=str)
def test_torchs_order_of_turns_takes_the_same(pipe):
    chance = random.Random(str(pipe))
    cost = {(kind, s): chance.uniform(1, 3) for kind in COST for s in range(pipe.stages)}
    found = run_turns(pipe, lambda turn: cost[turn.kind, turn.stage])
    assert found.seconds == pytest.approx(in_torchs_order(pipe, cost))


def in_torchs_order(pipe, cost):
    """When the last turn ends, each taken as early as those before it and what it needs allow."""
    left = [list(turns) for turns in in_torch(pipe)]
    ends, free = {}, [0.0] * pipe.workers
    last = pipe.stages - 1
    while any(left):
        before = sum(map(len, left))
        for place, turns in enumerate(left):
            while turns:
                kind, stage, part = turns[0].kind, turns[0].stage, turns[0].microbatch
                if kind == "forward":
                    needs = ("forward", stage - 1, part) if stage else None
                else:
                    needs = (
                        ("backward", stage + 1, part) if stage < last else ("forward", last, part)
                    )
                if needs is not None and needs not in ends:
                    break
                start = max(free[place], ends[needs] if needs else 0.0)
                ends[kind, stage, part] = free[place] = start + cost[kind, stage]
                turns.pop(0)
        assert sum(map(len, left)) < before, "it stands still"
    return max(free)


def test_a_link_carries_one_micro_batch_after_the_other():
    pipe = Pipe(schedule="gpipe", workers=2, microbatches=4)
    found = run_turns(pipe, lambda turn: 1.0, lambda source, to, turn: 3.0)
    # Forward: the first turn, four on the way, the last turn; and the same back.
    assert found.seconds == pytest.approx(2 * (1 + 4 * 3 + 1))
    assert found.link_busy_seconds == pytest.approx(12.0)


def test_more_micro_batches_idle_less_and_slower_links_cost_more():
    few, many = (simulate(experiment(f"pipeline:microbatches={n}")) for n in (4, 16))
    assert many.phases["wait"] < few.phases["wait"]
    slow = simulate(experiment(link="1gbit"))
    assert slow.phases["exchange_exposed"] > 2 * few.phases["exchange_exposed"]
    assert max(slow.needs, key=slow.needs.get) == "links between stages"
    for outcome in (few, many, slow):
        assert sum(outcome.phases.values()) == pytest.approx(outcome.step_seconds)


def test_pipelines_side_by_side_add_an_average_of_gradients():
    alone = simulate(experiment(workers=2))
    twins = simulate(experiment("pipeline:replicas=2", workers=4))
    assert twins.phases["exchange_exposed"] > alone.phases["exchange_exposed"]
    moved = twins.worker_bytes
    assert sum(sent for sent, _ in moved) > 4 * 25e6
    assert moved[0] == moved[2], "the first places of two pipelines"


def test_every_worker_has_the_compute_of_its_own_stages():
    outcome = simulate(experiment("pipeline:replicas=2", workers=4))
    timeline = Timeline()
    simulate(experiment("pipeline:replicas=2", workers=4), timeline=timeline)
    drawn = {
        name: sum(s.seconds for s in timeline.spans if (s.member, s.lane) == (name, "device"))
        for name in ("worker0", "worker1")
    }
    computing = [pace.phases["forward"] + pace.phases["backward"] for pace in outcome.paces]
    assert computing == pytest.approx([*drawn.values()] * 2)
    assert max(computing) == pytest.approx(outcome.needs["compute"])
    for pace in outcome.paces:
        assert sum(pace.phases.values()) == pytest.approx(outcome.step_seconds)
    assert {"to worker1", "to worker0", "sums"} <= {span.lane for span in timeline.spans}


@pytest.mark.parametrize(
    ("text", "changes", "told"),
    [
        ("pipeline:memory=1GiB", {}, "leave memory out"),
        ("pipeline:schedule=gpipe", {"workers": 300}, "use at most"),
    ],
)
def test_what_cannot_be_predicted_is_refused(text, changes, told):
    with pytest.raises(SpecError, match=told):
        predict(experiment(text, **changes))


def test_the_command_and_its_drawing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = "--model resnet50 --device v100 --batch 64 --link 100gbit --workers 1,4 --json"
    text = "pipeline:microbatches=8"
    with pytest.raises(SystemExit) as stop:
        main.main(["predict", *asked.split(), "--architecture", text])
    assert stop.value.code == 0
    one, four = json.loads(capsys.readouterr().out)["points"]
    assert 1.0 < four["samples_per_second"] / one["samples_per_second"] < 4.0
    assert 3 / 11 < four["idle_fraction"] < 0.6  # more than equal stages would wait
    drawn = Timeline()
    simulate(experiment(), timeline=drawn)
    assert {span.member for span in drawn.spans} == {f"worker{place}" for place in range(4)}
