"""`pipeline` trains like one worker, whatever the schedule, and more than one worker could hold."""

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import record, spec
from paceline.architectures.pipeline.stage import Stage
from paceline.builtin import loop
from paceline.cli.job import stages_started
from paceline.compute.units import units_of
from paceline.errors import MemberError, SpecError
from paceline.protocol.partition import UnitCost, cut, in_flight
from paceline.protocol.pipeline import Pipe
from paceline.record import RunFolder
from paceline.session.session import Session
from paceline.testing import run_members

SMALL = {"model": "mnist-dnn", "data": "synthetic", "global_batch": 24, "steps": 20, "seed": 4}
MIB = 2**20


def train_recorded(session: Session) -> None:
    folder = RunFolder(Path(session.identity.run))
    loop.train(folder.experiment(), session, folder)


def curve(tmp_path, architecture, workers, work=train_recorded, **changes) -> dict[int, float]:
    experiment = spec.replace(
        spec.Experiment(), architecture=architecture, workers=workers, **{**SMALL, **changes}
    )
    name = spec.format_architecture(architecture).replace(":", "-")
    folder = RunFolder.create(tmp_path / name, experiment)
    run_members(work, workers=workers, architecture=architecture, folder=folder)
    members = [member.name for member in folder.members()]
    return record.losses({name: folder.steps(name) for name in members})


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_follows_single(tmp_path, schedule, workers):
    single = curve(tmp_path, spec.Single(), 1)
    chosen = spec.Pipeline(schedule=schedule)
    assert curve(tmp_path, chosen, workers) == pytest.approx(single, rel=1e-4)
    summary = record.summarise(RunFolder(next(tmp_path.glob("pipeline*"))), "finished")
    assert sum(member.counters["parameter_bytes"] for member in summary.members) == 712_440
    assert summary.breakdown_seconds["wait"] > 0
    filling = (workers - 1) / (chosen.microbatches + workers - 1)  # uneven stages idle more
    told = {member.counters["schedule_idle_fraction"] for member in summary.members}
    assert len(told) == 1
    assert filling - 1e-6 <= told.pop() < 1


def test_interleaved_stages_and_clipping_follow_single(tmp_path):
    more = {
        "model": "tutorial-cnn",
        "data": "shapes",
        "steps": 6,
        "clip_norm": 0.5,
        "optimizer": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9},
    }
    single = curve(tmp_path, spec.Single(), 1, **more)
    chosen = spec.Pipeline(schedule="interleaved", loops=2)
    assert curve(tmp_path, chosen, 2, **more) == pytest.approx(single, rel=1e-4)


def test_replicas_of_a_pipeline_follow_single(tmp_path):
    single = curve(tmp_path, spec.Single(), 1)
    chosen = spec.Pipeline(replicas=2, microbatches=2)
    assert curve(tmp_path, chosen, 4) == pytest.approx(single, rel=1e-4)


def test_weights_shared_by_the_first_and_the_last_stage_stay_one(tmp_path):
    more = {"model": "gpt-small", "global_batch": 4, "steps": 4, "input_shape": (8,)}
    single = curve(tmp_path, spec.Single(), 1, **more)
    chosen = spec.Pipeline(microbatches=2)
    assert curve(tmp_path, chosen, 2, **more) == pytest.approx(single, rel=1e-4)


def train_without_a_microbatch(session: Session) -> None:
    """What a broken schedule would do: the last micro-batch's gradients are lost."""
    backward = Stage.backward_one_chunk

    def broken(self, chunk, *args, **kwargs):
        before = {p: None if p.grad is None else p.grad.clone() for p in self.submod.parameters()}
        result = backward(self, chunk, *args, **kwargs)
        if chunk == 3:
            for parameter, gradient in before.items():
                parameter.grad = gradient
        return result

    Stage.backward_one_chunk = broken
    train_recorded(session)


def test_the_comparison_notices_a_dropped_microbatch(tmp_path):
    single = curve(tmp_path, spec.Single(), 1)
    broken = curve(tmp_path, spec.Pipeline(), 2, work=train_without_a_microbatch)
    assert max(abs(broken[step] / single[step] - 1) for step in single) > 1e-3


def large() -> nn.Module:
    """24 layers of 16 MiB: with gradients and momentum 1.2 GiB."""
    layers = [nn.Linear(784, 2048), nn.ReLU()]
    for _ in range(24):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(2048, 10))


def train_with_little_memory(session: Session) -> None:
    """No more than 1000 MiB on top of what the process had when it started."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (data_kib,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmData")]
    limit = int(data_kib) * 1024 + 1000 * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    train_recorded(session)


def test_a_model_larger_than_one_workers_memory_trains(tmp_path):
    more = {
        "model": "tests.architectures.test_pipeline:large",
        "input_shape": (784,),
        "global_batch": 8,
        "steps": 3,
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9},
    }
    with pytest.raises(MemberError, match="memory"):
        curve(tmp_path / "alone", spec.Single(), 1, work=train_with_little_memory, **more)
    chosen = spec.Pipeline(memory="700MiB")
    losses = curve(tmp_path, chosen, 2, work=train_with_little_memory, **more)
    whole = curve(tmp_path, spec.Single(), 1, **more)
    assert losses == pytest.approx(whole, rel=1e-4)


def distribute_a_model(session: Session) -> None:
    model = nn.Linear(4, 2)
    session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_script_that_calls_its_model_is_refused():
    with pytest.raises(MemberError, match="cannot be a pipeline"):
        run_members(distribute_a_model, workers=2, architecture=spec.Pipeline())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"workers": 1}, "no 1 pipelines of two stages"),
        ({"workers": 3, "architecture": spec.Pipeline(replicas=2)}, "stages x replicas"),
        ({"workers": 8}, "microbatches=8 or more"),
        ({"global_batch": 10}, "write global_batch = 8"),
        (
            {"architecture": spec.Pipeline(schedule="interleaved", microbatches=5)},
            "write microbatches=4",
        ),
        ({"evaluate": True}, "evaluate does not go with it"),
        ({"compile": True}, "compile does not go with it"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_at_once(changes, complaint):
    with pytest.raises(SpecError, match=complaint):
        spec.replace(
            spec.Experiment(), **{"architecture": spec.Pipeline(), "workers": 2, **changes}
        )


class Tangled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_a_model_that_shows_no_row_is_refused():
    with pytest.raises(SpecError, match="units"):
        units_of(Tangled())


def unit(seconds: float, weights: int = 0, kept: int = 0) -> UnitCost:
    return UnitCost(seconds=seconds, parameter_bytes=weights, activation_bytes=kept)


def test_cuts_make_the_slowest_stage_fast():
    costs = [unit(1), unit(1), unit(4), unit(1), unit(1)]
    free = {"weight_factor": 2.0, "memory_bytes": None}
    assert cut(costs, pieces=3, held=[1, 1, 1], **free) == [0, 2, 3]
    assert cut(costs, pieces=2, held=[1, 1], **free) in ([0, 2], [0, 3])


def test_cuts_fit_the_memory_or_say_what_is_needed():
    costs = [unit(5, 100, 10), unit(1, 100, 10), unit(1, 100, 10), unit(1, 100, 10)]
    options = {"pieces": 2, "held": [2, 1], "weight_factor": 2.0}
    assert cut(costs, memory_bytes=None, **options) == [0, 1]
    assert cut(costs, memory_bytes=500, **options) == [0, 2]
    with pytest.raises(SpecError, match="no 2 stages fit 300 B"):
        cut(costs, memory_bytes=300, **options)


def test_fewer_microbatches_wait_in_1f1b_and_in_later_loops():
    def held(**pipe):
        made = Pipe(microbatches=8, **pipe)
        return [in_flight(made, stage) for stage in range(made.stages)]

    assert held(schedule="1f1b", workers=4) == [4, 3, 2, 1]
    assert held(schedule="gpipe", workers=4) == [8, 8, 8, 8]
    assert held(schedule="interleaved", workers=2, loops=2) == [4, 3, 2, 1]


def test_a_launchers_workers_make_the_pipeline():
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert stages_started("pipeline:microbatches=2", started) == 2
    assert stages_started("ring", started) is None
    assert stages_started("pipeline", {}) is None
