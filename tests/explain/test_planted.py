"""Real runs, each slowed by one thing on purpose. `explain` must name that thing, and only then.

Emulated devices sleep their layers' times, so what is planted does not depend on this machine.
"""

import math
from itertools import pairwise

import pytest

from paceline import engines, spec
from paceline.errors import MemberError
from paceline.explain import explain
from paceline.record import open_folder
from paceline.tunnel.namespaces import missing_rights
from tests.support.toy_device import write_toy_device

pytestmark = pytest.mark.quiet

SLOW_INPUT = """
import time
import torch
import paceline

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(8), 0

session = paceline.init()
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for step, (inputs, targets) in enumerate(paceline.shard(torch.utils.data.DataLoader(Slow(), 8))):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    if step == 30:
        break
"""


@pytest.fixture
def device(tmp_path):
    """A device on which a step of the tutorial CNN takes 0.3 s; skips without a tunnel."""
    missing = missing_rights()
    if missing:
        pytest.skip(f"no tunnel here: {', '.join(missing)} missing")
    return write_toy_device(tmp_path, forward_seconds=0.02, backward_seconds=0.04)


def run_in_tunnel(device, path, architecture="ring", **cluster):
    tables = {
        "engine": "tunnel",
        "architecture": architecture,
        "workload": {"model": "tutorial-cnn", "data": "synthetic", "batch": 32, "steps": 10},
        "cluster": {"workers": 2, "link": "1gbit", "device": device, **cluster},
        "measurement": {"warmup_steps": 2, "sample_seconds": 0.2},
    }
    return explain(engines.run(spec.from_tables(tables, "test"), path))


def named(found):
    return [cause.name for cause in found.causes]


@pytest.mark.slow
@pytest.mark.tunnel
def test_a_healthy_run(device, tmp_path):
    # Slowed four times, so that a busy machine's own delays do not look like a run's.
    found = run_in_tunnel(device, tmp_path / "run", link="4gbit", dilation=4.0)
    assert found.healthy, found.verdict
    assert found.limit_seconds == pytest.approx(0.3, rel=0.2)


@pytest.mark.tunnel
def test_a_slow_link(device, tmp_path):
    found = run_in_tunnel(device, tmp_path / "run", link="100mbit")
    assert named(found)[0] == "slow-link", found.verdict
    assert found.resources[0].name.startswith("link of worker")
    assert found.resources[0].seconds == pytest.approx(0.56, rel=0.15)


@pytest.mark.tunnel
def test_a_slow_worker(device, tmp_path):
    hosts = [{}, {"slowdown": 2.0}]
    found = run_in_tunnel(device, tmp_path / "run", hosts=hosts)
    assert named(found)[0] == "slow-worker", found.verdict
    assert (found.late.worker, found.late.reason) == ("worker1", "compute")
    assert found.late.factor == pytest.approx(2, rel=0.2)


@pytest.mark.slow
@pytest.mark.tunnel
def test_one_overloaded_server(device, tmp_path):
    found = run_in_tunnel(
        device, tmp_path / "run", architecture="server", workers=3, servers=1, link="200mbit"
    )
    assert named(found)[0] == "server", found.verdict
    assert found.resources[0].name == "link of server0"


@pytest.mark.slow
def test_too_small_a_batch(tmp_path):
    tables = {
        "architecture": "ring",
        "workload": {"model": "mnist-dnn", "data": "synthetic", "batch": 1, "steps": 60},
        "cluster": {"workers": 2},
    }
    found = explain(engines.run(spec.from_tables(tables, "test"), tmp_path / "run"))
    assert named(found)[0] == "small-batch", found.verdict
    assert "batch" in found.actions[0].text


def test_slow_input(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SLOW_INPUT)
    tables = {
        "architecture": "ring",
        "workload": {"script": {"path": str(script)}},
        "cluster": {"workers": 2},
    }
    run = engines.run(spec.from_tables(tables, "test"), tmp_path / "run")
    found = explain(run)
    assert named(found)[0] == "input", found.verdict
    parts = {part.name: part.fraction for part in found.parts}
    assert parts["input"] > 0.5


def run_here(path, workload, **fields):
    tables = {
        "architecture": "ring",
        "workload": {"model": "mnist-dnn", "data": "shapes", "steps": 24, **workload},
        "cluster": {"workers": 2},
        "measurement": {"sample_seconds": 0.2},
        **fields,
    }
    return engines.run(spec.from_tables(tables, "test"), path)


@pytest.mark.slow
def test_a_real_loss_that_is_no_number(tmp_path):
    rate = {"optimizer": {"learning_rate": 1e6}, "model": "tutorial-cnn", "steps": 8}
    run = run_here(tmp_path / "run", rate)
    found = explain(run)
    assert named(found)[0] == "not-finite", found.verdict
    assert math.isnan(run.summary().loss.last)


@pytest.mark.slow
def test_real_checkpoints_are_in_the_wall_time_and_in_no_step(tmp_path):
    run = run_here(tmp_path / "run", {"checkpoint_every": 2})
    wall = run.summary().wall_seconds
    assert wall["checkpoint"] > 0
    assert {"start-up", "first steps", "steps", "teardown"} <= wall.keys()
    steps = run.steps("worker0")
    last = next(member for member in run.members() if member.name == "worker0")
    written = [one["checkpoint"] for step in steps if (one := step.paused_seconds)]
    written.append(last.paused_seconds["checkpoint"])  # behind the last step
    assert len(written) == 12
    # What worker 0 waited for because the other one was paused for longer comes on top.
    assert wall["checkpoint"] >= 0.999 * sum(written)
    for before, step in pairwise(steps):
        paused = sum(step.paused_seconds.values())
        assert step.start_seconds >= before.end_seconds + 0.999 * paused
    summary = run.summary()
    assert summary.samples_per_second_with_pauses < summary.samples_per_second


PAUSES = """
import time
import torch
import paceline

session = paceline.init()
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
data = torch.utils.data.TensorDataset(torch.ones(512, 8), torch.zeros(512, dtype=torch.long))
for step, (inputs, targets) in enumerate(paceline.shard(torch.utils.data.DataLoader(data, 8))):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    if step % 5 == 4:
        model.eval()
        with torch.no_grad():
            model(inputs)
            time.sleep(0.3)
        model.train()
    if step == 29:
        if session.rank == 1:
            raise RuntimeError("planted")
        break
"""


@pytest.mark.slow
def test_a_script_that_evaluates_and_then_fails(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PAUSES)
    tables = {
        "architecture": "ring",
        "workload": {"script": {"path": str(script)}},
        "cluster": {"workers": 2},
    }
    with pytest.raises(MemberError):
        engines.run(spec.from_tables(tables, "test"), tmp_path / "run")
    found = explain(open_folder(tmp_path / "run"))
    assert named(found)[:2] == ["failed", "pauses"], found.verdict
    assert found.verdict.startswith("The run failed after 30 steps: worker1 exited 1")
    assert "planted" in found.verdict
    assert {part.name for part in found.wall} >= {"evaluation", "steps"}
