"""Somebody is killed and the others go on in place: nobody is started again, nothing is guessed.

The weights are compared with those of one process that leaves out just the samples which the record
says were not seen.
"""

import re

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.support.by_hand import Job

STEPS, BATCH, WORKERS = 80, 12, 3


def expected(lost, cut, steps, workers=WORKERS):
    """What one worker makes of the same batches without the lost one's part of some steps."""
    torch.manual_seed(3)
    inputs = torch.randn(6 * STEPS, 6)
    targets = torch.sin(inputs.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True)
    step, part = 0, BATCH // workers
    for _ in range(2):
        for x, y in loader:
            kept = torch.ones(BATCH, dtype=torch.bool)
            if cut <= step < cut + steps:
                kept[lost * part : (lost + 1) * part] = False
            optimizer.zero_grad()
            functional.mse_loss(model(x[kept]), y[kept]).backward()
            optimizer.step()
            step += 1
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def weights(said):
    (line,) = [line for line in said.splitlines() if line.startswith("weights")]
    return [float(value) for value in line.split()[1:]]


def the_loss(job, name):
    """Its event: the first step that it does not count in, and the samples that nobody saw."""
    (event,) = [event for event in job.folder.events() if event.kind == "lost"]
    assert event.member == name
    assert re.match(rf"{name} was lost in step {event.step}; {event.samples} of its", event.text)
    return event.step, event.samples


def ended_without(victims, path, architecture, workers, servers):
    """A job in which these were killed one after the other, and how all others ended: well."""
    with Job(path, architecture, workers, servers, STEPS, on_loss="continue") as job:
        for number, name in enumerate(victims):
            job.kill(name, 6 + 20 * number)
        ended = job.endings()
    for name in victims:
        del ended[name]
    assert {name: status for name, (status, _) in ended.items()} == dict.fromkeys(ended, 0), ended
    return job, ended


@pytest.mark.parametrize(
    ("architecture", "servers", "lost"),
    [
        ("server:transport=tcp,chunk=256B", 2, 1),
        ("server:transport=tcp,chunk=256B", 2, 0),
        pytest.param("server", 1, 1, marks=pytest.mark.slow),
        pytest.param("server", 1, 0, marks=pytest.mark.slow),
        pytest.param("server:update=worker", 2, 1, marks=pytest.mark.slow),
        pytest.param("server:update=worker", 2, 0, marks=pytest.mark.slow),
        pytest.param("server:mode=bounded,staleness=0,transport=tcp", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_in_step_the_mean_is_over_those_who_took_part(tmp_path, architecture, servers, lost):
    """Worker 0 too: the next one keeps the store then, and says what there is to be said."""
    with Job(tmp_path, architecture, WORKERS, servers, STEPS, on_loss="continue") as job:
        job.kill(f"worker{lost}")
        ended = job.endings(but=f"worker{lost}")
    assert {name: status for name, (status, _) in ended.items()} == dict.fromkeys(ended, 0), ended
    cut, unseen = the_loss(job, f"worker{lost}")
    assert unseen == 2 * BATCH // WORKERS, "two steps' parts"
    found = [said for name, (_, said) in ended.items() if name.startswith("worker")]
    assert len(found) == 2
    for said in found:
        sizes = [int(line.split()[1]) for line in said.splitlines() if line.startswith("step ")]
        assert sizes == [4] * (cut + 2) + [6] * (STEPS - cut - 2), "halves from one step on"
        assert weights(said) == pytest.approx(expected(lost, cut, 2), abs=1e-5)
    assert weights(found[0]) == weights(found[1])


@pytest.mark.parametrize(
    ("architecture", "victims"),
    [
        ("server:transport=tcp,chunk=256B", ["server0"]),
        pytest.param("server:transport=tcp,chunk=256B", ["server1"], marks=pytest.mark.slow),
        pytest.param(
            "server:transport=tcp,chunk=256B,update=worker", ["server0"], marks=pytest.mark.slow
        ),
        pytest.param(
            "server:transport=tcp,chunk=128B", ["server2", "server0"], marks=pytest.mark.slow
        ),
    ],
)
def test_what_a_killed_server_had_goes_on_elsewhere(tmp_path, architecture, victims):
    """Momentum and all: nothing that a worker was told of is lost, and no sample."""
    servers = len(victims) + 1
    job, ended = ended_without(victims, tmp_path, architecture, WORKERS, servers)
    lost = [event.member for event in job.folder.events() if event.kind == "lost"]
    assert lost == victims
    states = {member.name: member.status for member in job.folder.members()}
    assert {name for name, state in states.items() if state != "finished"} == set(victims)
    found = [weights(ended[f"worker{rank}"][1]) for rank in range(WORKERS)]
    assert found[0] == found[1] == found[2]
    assert found[0] == pytest.approx(expected(0, STEPS, 0), abs=1e-5)


@pytest.mark.slow
def test_the_comparison_notices_samples_that_were_counted_all_the_same():
    assert expected(1, 20, 2) != pytest.approx(expected(1, 20, 0), abs=1e-4)


@pytest.mark.parametrize(
    "architecture",
    ["server:mode=bounded,staleness=2,transport=tcp"],
)
def test_a_step_ahead_of_others_they_go_on_too(tmp_path, architecture):
    with Job(tmp_path, architecture, WORKERS, 2, STEPS, on_loss="continue") as job:
        job.kill("worker2")
        ended = job.endings(but="worker2")
    assert {name: status for name, (status, _) in ended.items()} == dict.fromkeys(ended, 0), ended
    _, unseen = the_loss(job, "worker2")
    assert unseen == 4 * BATCH // WORKERS, "as many steps' parts as they may be ahead, and two"


COLOCATED = "server:placement=colocated,chunk=256B"


@pytest.mark.parametrize(
    ("architecture", "workers", "servers", "victims"),
    [
        (COLOCATED, 3, 0, [1]),
        pytest.param(COLOCATED, 3, 0, [0], marks=pytest.mark.slow),
        pytest.param(COLOCATED, 2, 0, [0], marks=pytest.mark.slow),
        pytest.param(f"{COLOCATED},update=worker", 3, 0, [2], marks=pytest.mark.slow),
        pytest.param(COLOCATED, 4, 0, [2, 0], marks=pytest.mark.slow),
        pytest.param(
            "server:placement=optimal,chunk=128B,transport=tcp", 3, 1, [1], marks=pytest.mark.slow
        ),
    ],
)
def test_a_worker_that_serves_leaves_its_chunks_to_the_others(
    tmp_path, architecture, workers, servers, victims
):
    """Weights, momentum and gradients of sealed steps: as if it had left its samples out alone."""
    lost = [f"worker{rank}" for rank in victims]
    job, ended = ended_without(lost, tmp_path, architecture, workers, servers)
    cuts = [e.step for e in job.folder.events() if e.kind == "lost" and e.member in lost]
    assert len(cuts) == len(victims)
    states = {member.name: member.status for member in job.folder.members()}
    assert {name for name, state in states.items() if state != "finished"} == set(lost)
    found = [weights(said) for name, (_, said) in ended.items() if name.startswith("worker")]
    assert len(found) == workers - len(victims)
    assert all(one == found[0] for one in found)
    if len(victims) == 1:
        alone = expected(victims[0], cuts[0], 2, workers)
        assert found[0] == pytest.approx(alone, abs=1e-5)
