"""Faults in the tunnel: a cable is pulled out and put back, a member killed."""

import pytest

from paceline import engines, spec
from paceline.bench import drill
from tests.support.toy_device import write_toy_device
from tests.tunnel.test_engine import experiment

pytestmark = [pytest.mark.tunnel, pytest.mark.quiet]

STEPS = 50
"""Of 0.1 to 0.3 s: some seconds are left for a launcher that is slow to notice the tenth."""


@pytest.fixture
def toy_device(tmp_path):
    return write_toy_device(tmp_path, forward_seconds=0.002, backward_seconds=0.004)


def disturbed(toy_device, architecture, *faults, restarts=0, **cluster):
    asked = spec.replace(experiment(toy_device, architecture, **cluster), steps=STEPS)
    asked = drill.with_faults(asked, [spec.parse_fault(*fault) for fault in faults])
    return spec.replace(asked, restarts=restarts)


def test_a_pulled_cable_holds_everybody_up_and_ends_nobody(rights, toy_device, tmp_path):
    asked = disturbed(toy_device, "ring", ("cut", "worker1@10:1s"))
    folder = engines.run(asked, tmp_path / "run")
    (event,) = [event for event in folder.events() if event.kind == "fault"]
    assert event.member == "worker1"
    for worker in ("worker0", "worker1"):
        steps = folder.steps(worker)
        assert len(steps) == STEPS
        longest = max(steps[5:], key=lambda step: step.seconds)
        assert longest.seconds > 0.5, "the step in which the cable was out"
        assert longest.end_seconds > event.time_seconds


def test_an_emulated_device_that_pauses_is_in_the_record(rights, toy_device, tmp_path):
    asked = disturbed(toy_device, "ring", ("pause", "worker1@10:1s"))
    folder = engines.run(spec.replace(asked, steps=40), tmp_path / "run")
    (event,) = [event for event in folder.events() if event.kind == "fault"]
    assert event.member == "worker1"
    assert folder.steps("worker1")[10].seconds >= 0.9, "a device may be late, but never early"
    (cost,) = drill.score(folder, folder).costs
    assert cost.fault == "pause worker1 at step 10 for 1 s"


@pytest.mark.slow
def test_a_device_pauses_at_its_step_after_a_restart_too(rights, toy_device, tmp_path):
    asked = disturbed(
        toy_device, "ring", ("kill", "worker0@20"), ("pause", "worker1@100:1s"), restarts=1
    )
    folder = engines.run(spec.replace(asked, checkpoint_every=10), tmp_path / "run")
    assert len(folder.restarts()) == 1
    steps = {step.step: step.seconds for step in folder.steps("worker1")}
    assert steps[100] >= 0.9
    told = [event.text for event in folder.events() if event.kind == "fault"]
    assert sorted(told) == [
        "fault: kill worker0 at step 20",
        "fault: pause worker1 at step 100 for 1 s",
    ]


def test_a_killed_worker_is_started_again_with_all_others(rights, toy_device, tmp_path):
    asked = disturbed(toy_device, "server", ("kill", "worker1@10"), restarts=1, servers=1)
    folder = engines.run(asked, tmp_path / "run")
    assert folder.summary().status == "finished"
    assert len(folder.restarts()) == 1
    assert folder.steps("worker0")[-1].step == STEPS - 1
