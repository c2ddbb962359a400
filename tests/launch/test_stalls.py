"""A job that stands still is told, with the one that holds it up; one that computes is not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from paceline import spec
from paceline.launch import stalls
from paceline.launch.stalls import Stalls
from paceline.record import RunFolder

IDLE, BUSY = "import time\nwhile True: time.sleep(0.05)", "while True: pass"


@pytest.fixture
def members():
    """Starts processes, each leading a group, and ends them."""
    started = []

    def start(code):
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        started.append(process)
        return process.pid

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def folder(tmp_path):
    experiment = spec.Experiment(
        architecture=spec.parse_architecture("ring"), cluster=spec.Cluster(workers=2)
    )
    return RunFolder.create(tmp_path / "run", experiment)


def write_steps(folder, name, steps):
    lines = [
        b'{"step":%d,"start_seconds":0,"end_seconds":1,"breakdown_seconds":{},"samples":1}\n' % step
        for step in range(steps)
    ]
    (folder.path / "members" / f"{name}.steps.jsonl").write_bytes(b"".join(lines))


def told(monkeypatch, folder, pids, steps, looks):
    """What is said of these members within so many looks."""
    said = []
    monkeypatch.setattr(stalls, "LEAST_SECONDS", 2.0)
    watched = Stalls(folder, said.append)
    for name, pid in pids.items():
        watched.started(name, pid)
        write_steps(folder, name, 1)
    for _ in range(looks):
        watched()
        for name, number in steps.items():
            write_steps(folder, name, number)
        time.sleep(1.02)
    return said


def test_one_that_is_stopped_is_named(monkeypatch, folder, members):
    pids = {"worker0": members(IDLE), "worker1": members(IDLE)}
    os.killpg(pids["worker1"], signal.SIGSTOP)
    said = told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 8}, looks=6)
    assert len(said) == 1, "once, not every second"
    assert "worker1 is stopped (SIGSTOP), and worker0 waits" in said[0]
    (event,) = [event for event in folder.events() if event.kind == "stall"]
    assert event.text == said[0]


def test_one_that_is_behind_and_idle_is_named(monkeypatch, folder, members):
    pids = {"worker0": members(IDLE), "worker1": members(IDLE)}
    said = told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 8}, looks=6)
    assert "worker1 is behind, at step 8, and idle, and worker0 waits" in said[0]


def test_one_that_computes_between_two_steps_is_left_alone(monkeypatch, folder, members):
    pids = {"worker0": members(BUSY), "worker1": members(IDLE)}
    assert not told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 9}, looks=6)


def test_before_the_first_step_nothing_is_unusual(monkeypatch, folder, members):
    said = []
    monkeypatch.setattr(stalls, "LEAST_SECONDS", 1.0)
    watched = Stalls(folder, said.append)
    watched.started("worker0", members(IDLE))
    for _ in range(4):
        watched()
        time.sleep(1.02)
    assert not said
