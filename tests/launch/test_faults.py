"""Faults that happen on purpose, on real processes; restarts that go on where a checkpoint was."""

import os
import signal
import subprocess
import sys
import time

import pytest

from paceline import engines, spec
from paceline.bench import drill
from paceline.errors import FaultError, MemberError, SpecError
from paceline.explain import conclude
from paceline.launch import restarts
from paceline.launch.faults import Faults, check_faults
from paceline.record import RunFolder

WORKLOAD = {
    "model": "tests.support.user_models:that_waits_for_its_faults",
    "input_shape": (123,),
    "data": "synthetic",
    "global_batch": 16,
    "steps": 150,
    "checkpoint_every": 40,
}

WAYS_OUT = "  fix: --on-loss continue goes on without it; --restarts 3 starts all again."


def asked(architecture, faults=(), servers=0, restarts=0, **workload):
    experiment = spec.Experiment(
        architecture=spec.parse_architecture(architecture),
        cluster=spec.Cluster(workers=2, servers=servers, restarts=restarts),
        workload=spec.Workload(**{**WORKLOAD, **workload}),
    )
    return drill.with_faults(experiment, [spec.parse_fault(*fault) for fault in faults])


@pytest.mark.parametrize(
    ("architecture", "servers", "member"),
    [
        ("ring", 0, "worker1"),
        pytest.param("server", 1, "server0", marks=pytest.mark.slow),
        pytest.param("server:placement=colocated", 0, "worker0", marks=pytest.mark.slow),
    ],
)
def test_a_killed_member_costs_steps_and_not_the_result(tmp_path, architecture, servers, member):
    plain = engines.run(asked(architecture, servers=servers), tmp_path / "plain")
    faults = [("kill", f"{member}@60")]
    hurt = engines.run(asked(architecture, faults, servers, restarts=1), tmp_path / "hurt")
    assert hurt.summary().status == "finished"
    assert len(hurt.restarts()) == 1
    found = drill.score(plain, hurt)
    (cost,) = found.costs
    assert cost.member == member
    assert cost.restarted
    assert cost.step >= 60
    assert found.loss_difference == 0.0, "it went on as if nothing had happened"
    for worker in ("worker0", "worker1"):  # what a killed one had not yet written is not there
        steps = [step.step for step in hurt.steps(worker)]
        assert steps == sorted(set(steps)), "a step that was done again counts once"
        assert steps[-1] == 149
    assert "recovery" in hurt.summary().wall_seconds
    conclude(hurt)
    assert "Recoveries from lost members take" in hurt.summary().verdict


def test_without_restarts_a_killed_member_ends_the_run_and_is_named(tmp_path):
    with pytest.raises(MemberError, match=r"worker1 was ended by signal 9") as caught:
        engines.run(asked("ring", [("kill", "worker1@5")]), tmp_path / "run")
    assert str(caught.value).splitlines()[-1] == WAYS_OUT
    folder = RunFolder(tmp_path / "run")
    assert folder.summary().status == "failed"
    (event,) = [event for event in folder.events() if event.kind == "fault"]
    assert event.member == "worker1"
    ends = {member.name: member.status for member in folder.members()}
    assert ends["worker1"] == "failed"
    assert ends["worker0"] in ("failed", "ended")


@pytest.mark.slow
def test_a_run_that_fails_every_time_fails(tmp_path):
    faults = [("kill", "worker0@3"), ("kill", "worker1@100")]
    with pytest.raises(MemberError, match="worker1"):
        engines.run(asked("ring", faults, restarts=1), tmp_path / "run")
    assert len(RunFolder(tmp_path / "run").restarts()) == 1


@pytest.mark.slow
def test_a_complete_run_that_is_started_again_ends(tmp_path, monkeypatch):
    def twice(folder, allowed, life, **options):
        life()
        restarts.live(folder, allowed, life, **options)

    monkeypatch.setattr(engines, "live", twice)
    folder = engines.run(asked("ring", steps=6, checkpoint_every=4), tmp_path / "run")
    assert folder.summary().status == "finished"
    assert [step.step for step in folder.steps("worker0")] == list(range(6))


def test_a_fault_that_does_not_happen_is_told(tmp_path):
    folder = RunFolder.create(tmp_path / "run", asked("ring"))
    faults = Faults([spec.parse_fault("kill", "worker0@50")], folder)
    faults.started("worker0", os.getpid())
    faults()
    with pytest.raises(FaultError, match="kill worker0 at step 50"):
        faults.check_happened()


def test_a_fault_that_comes_too_late_for_its_member_has_not_happened(tmp_path):
    """The launcher looked when its steps were done and it had ended: nothing is shown by that."""
    folder = RunFolder.create(tmp_path / "run", asked("ring"))
    line = b'{"step":99,"start_seconds":0,"end_seconds":1,"breakdown_seconds":{},"samples":1}\n'
    (folder.path / "members" / "worker1.steps.jsonl").write_bytes(line)
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait(30)
    faults = Faults([spec.parse_fault("kill", "worker1@50")], folder)
    faults.started("worker1", ended.pid)
    faults()
    assert folder.events() == []
    with pytest.raises(FaultError, match="kill worker1 at step 50"):
        faults.check_happened()


def test_what_a_device_does_by_itself_is_written_down_and_nobody_is_stopped(tmp_path):
    folder = RunFolder.create(tmp_path / "run", asked("ring"))
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], start_new_session=True,
                               stdin=subprocess.PIPE)  # fmt: skip
    try:
        pause, slow = (
            spec.parse_fault("pause", "worker1@3:9s"),
            spec.parse_fault("slow", "worker1@5:3x"),
        )
        faults = Faults([], folder, by_device=[pause, slow])
        faults.started("worker1", sleeper.pid)
        faults()
        assert folder.events() == []
        line = b'{"step":3,"start_seconds":0,"end_seconds":1,"breakdown_seconds":{},"samples":1}\n'
        (folder.path / "members" / "worker1.steps.jsonl").write_bytes(line)
        faults()
        (event,) = folder.events()
        assert event.time_seconds == 0, "when that step began"
        assert (event.kind, event.member) == ("fault", "worker1")
        assert event.text == "fault: pause worker1 at step 3 for 9 s"
        assert state(sleeper.pid) != "T"
        with pytest.raises(FaultError, match="slow worker1 at step 5"):
            faults.check_happened()
    finally:
        os.killpg(sleeper.pid, signal.SIGKILL)
        sleeper.communicate()


def test_a_pause_stops_the_process_and_lets_it_go_on(tmp_path):
    folder = RunFolder.create(tmp_path / "run", asked("ring"))
    line = b'{"step":4,"start_seconds":0,"end_seconds":1,"breakdown_seconds":{},"samples":1}\n'
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], start_new_session=True,
                               stdin=subprocess.PIPE)  # fmt: skip
    try:
        faults = Faults([spec.parse_fault("pause", "worker1@5:50ms")], folder)
        faults.started("worker1", sleeper.pid)
        faults()
        assert state(sleeper.pid) != "T", "step 5 has not come"
        (folder.path / "members" / "worker1.steps.jsonl").write_bytes(line)
        faults()
        wait_for(lambda: state(sleeper.pid) == "T")
        wait_for(lambda: (faults(), state(sleeper.pid) != "T")[1])
        faults.check_happened()
    finally:
        os.killpg(sleeper.pid, signal.SIGKILL)
        sleeper.communicate()


def state(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait_for(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("kill", "worker1", "names no member and step"),
        ("kill", "worker1@5:3s", "names no member and step"),
        ("pause", "worker1@5", "names no member and step"),
        ("pause", "worker1@5:0s", "is no time"),
        ("pause", "worker1@5:soon", "no known unit"),
        ("slow", "worker1@5:3", "is no factor"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(kind, text, complaint):
    with pytest.raises(SpecError, match=complaint):
        spec.parse_fault(kind, text)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (("kill", "worker7@5"), 'no member "worker7"'),
        (("kill", "worker1@500"), "ends after 150 steps"),
        (("cut", "worker1@5:1s"), "does not happen on the engine here"),
        (("slow", "worker1@5:2x"), "does not happen on the engine here"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused_before_anything_starts(fault, complaint):
    with pytest.raises(SpecError, match=complaint):
        check_faults(asked("ring", [fault]))
