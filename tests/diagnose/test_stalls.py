"""A job that stands still is told, with the one that holds it up; one that computes is not."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count

import psutil
import pytest

from paceline import spec
from paceline.diagnose import stalls, thread_stacks
from paceline.diagnose.connections import Unheard, own_addresses, unheard
from paceline.diagnose.stall_causes import likely_cause
from paceline.diagnose.stalls import Stalls
from paceline.diagnose.thread_stacks import Frame, ThreadStack
from paceline.record import RunFolder
from paceline.wire import gloo_ports

THERE = "print('there', flush=True)\n"
SECONDS = 60.0
IDLE = f"import time\n{THERE}while True: time.sleep(0.05)"
BUSY = f"{THERE}while True: pass"


@pytest.fixture
def members():
    """Starts processes, each leading a group, and ends them.

    Each is there when it is returned: the start of Python is neither idle nor busy.
    """
    started = []

    def start(code):
        process = subprocess.Popen(
            [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
        )
        started.append(process)
        process.stdout.readline()
        return process.pid

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def folder(tmp_path):
    experiment = spec.Experiment(
        architecture=spec.parse_architecture("ring"), cluster=spec.Cluster(workers=2)
    )
    return RunFolder.create(tmp_path / "run", experiment)


def write_steps(folder, name, steps):
    lines = [
        b'{"step":%d,"start_seconds":0,"end_seconds":%f,"breakdown_seconds":{},"samples":1}\n'
        % (step, 0.1 * step)
        for step in range(steps)
    ]
    (folder.path / "members" / f"{name}.steps.jsonl").write_bytes(b"".join(lines))


def quicken(monkeypatch):
    """All times of the watch divided by 2.5."""
    for name in ("LEAST_SECONDS", "LOOK_SECONDS", "SAMPLE_SECONDS", "SURE_SECONDS"):
        monkeypatch.setattr(stalls, name, getattr(stalls, name) * 0.4)


def told(monkeypatch, folder, pids, steps, looks=None, lost=()):
    """What is said of these members: within so many looks, or at last and in two more."""
    said = []
    quicken(monkeypatch)
    watched = Stalls(folder, said.append, lost=lost)
    for name, pid in pids.items():
        watched.started(name, pid)
        write_steps(folder, name, 1)
    end = time.monotonic() + SECONDS
    while looks != 0:
        assert time.monotonic() < end, "nothing was said"
        watched()
        for name, number in steps.items():
            write_steps(folder, name, next(number) if isinstance(number, Iterator) else number)
        if looks is not None or said:
            looks = 2 if looks is None else looks - 1
        time.sleep(0.41)
    return said


def test_one_that_is_stopped_is_named(monkeypatch, folder, members):
    pids = {"worker0": members(IDLE), "worker1": members(IDLE)}
    os.killpg(pids["worker1"], signal.SIGSTOP)
    said = told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 8})
    assert len(said) == 1, "once, not every second"
    assert "worker1 is stopped (SIGSTOP), and worker0 waits" in said[0]
    (event,) = [event for event in folder.events() if event.kind == "stall"]
    assert event.text == said[0]


def test_a_loader_of_its_own_that_is_stopped_is_told(monkeypatch, folder, members):
    helper = "import os, signal, subprocess; c = subprocess.Popen(['sleep', '600']); "
    pids = {
        "worker0": members(IDLE),
        "worker1": members(f"{helper}c.send_signal(signal.SIGSTOP); {IDLE}"),
    }
    said = told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 9})
    assert "a process that worker1 started is stopped (SIGSTOP)" in said[0]


def test_what_is_certain_is_told_before_what_is_likely(monkeypatch, folder, members):
    pids = {"worker0": members(IDLE), "worker1": members(IDLE)}
    monkeypatch.setattr(stalls, "USUAL_STEPS", 1e6)
    assert not told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 8}, looks=5)
    os.killpg(pids["worker1"], signal.SIGSTOP)
    said = told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 8}, looks=6)
    assert "worker1 is stopped (SIGSTOP), and worker0 waits" in said[0]


ANSWERS = """
import sys, time
from pathlib import Path
from paceline.diagnose import thread_stacks

def {function}():
    print("there", flush=True)
    while True:
        time.sleep(0.05)

thread_stacks.answer(Path({run!r}), {name!r})
{function}()
"""


def answering(members, folder, name, function):
    return members(ANSWERS.format(run=str(folder.path), name=name, function=function))


def wait_for(condition, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_where_each_member_is_is_told(monkeypatch, folder, members):
    """The stack that a signal brings to light, and what follows from it."""
    pids = {
        "worker0": answering(members, folder, "worker0", "exchange_gradients"),
        "worker1": answering(members, folder, "worker1", "validate_alone"),
    }
    said = told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 9})
    (event,) = [event for event in folder.events() if event.kind == "stall"]
    first, *lines = said[0].splitlines()
    assert event.text == first
    assert "likely: exchanges in different orders" in first
    assert any("worker0 is in" in line and "exchange_gradients" in line for line in lines)
    assert any("worker1 is in" in line and "validate_alone" in line for line in lines)
    assert all(psutil.pid_exists(pid) for pid in pids.values())


def test_one_that_promised_no_answer_is_not_asked(folder, members):
    """The signal would end it."""
    pid = members(IDLE)
    thread_stacks.path_of(folder.path, "worker0").parent.mkdir()
    thread_stacks.path_of(folder.path, "worker0").write_text(f"pid {os.getpid()} main 0x0\n")
    assert thread_stacks.ask(folder.path, {"worker0": psutil.Process(pid)}) == {}
    time.sleep(0.2)
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_one_that_has_ended_early_is_named(monkeypatch, folder, members):
    pids = {"worker0": members(IDLE), "worker1": members("pass")}
    wait_for(lambda: psutil.Process(pids["worker1"]).status() == psutil.STATUS_ZOMBIE)
    said = told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 8})
    assert "worker1 after 8 steps has ended, and worker0 waits; likely: uneven data" in said[0]


@pytest.fixture
def deaf():
    """A listener on loopback; what comes for it after `doors` shut it is thrown away."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_port_that_is_blocked_is_seen(deaf):
    gloo_ports._attach(deaf)
    with socket.socket() as line:
        line.setblocking(False)
        with pytest.raises(BlockingIOError):
            line.connect(deaf.getsockname())
        wait_for(lambda: unheard(psutil.Process()))
        (end,) = unheard(psutil.Process())
    host, port = deaf.getsockname()
    assert (end.address, end.is_call) == (f"{host}:{port}", True)


def test_bytes_that_nobody_acknowledges_are_seen(deaf):
    with socket.create_connection(deaf.getsockname()) as line, deaf.accept()[0] as other:
        assert not unheard(psutil.Process())
        gloo_ports._attach(other)
        line.sendall(b"gradient")
        wait_for(lambda: unheard(psutil.Process()))
        (end,) = unheard(psutil.Process())
        assert end == Unheard("{}:{}".format(*deaf.getsockname()), 8, False)
        owners = dict.fromkeys(own_addresses(psutil.Process()), "worker1")
        told = likely_cause(SAME, {}, {"worker0": [end]}, owners)
    assert f"worker1 at {end.address} does not acknowledge 8 bytes of worker0's" in told


def stack(*functions, file="train.py"):
    return ThreadStack(tuple(Frame(function, file, 1) for function in functions))


LOADING = ThreadStack(
    (Frame("get", "/x/torch/utils/data/dataloader.py", 5), Frame("main", "t.py", 1))
)
SAME = {"worker0": 5, "worker1": 5}


@pytest.mark.parametrize(
    ("steps", "found", "ends", "cause"),
    [
        (SAME, {}, {"worker0": [Unheard("10.0.0.2:5", 9, False)]}, "the network: 10.0.0.2:5"),
        ({"worker0": 5, "worker1": 4}, {}, {"worker0": ()}, "uneven data: worker1"),
        ({"worker0": 5, "worker1": 4}, {"worker1": LOADING}, {}, "data: worker1 waits"),
        (SAME, {"worker0": stack("a"), "worker1": LOADING}, {}, "data: worker1 waits"),
        (SAME, {"worker0": LOADING, "worker1": LOADING}, {}, "data: worker0, worker1 wait for"),
        ({"worker0": 5, "worker1": 4}, {"worker1": stack("think")}, {}, "held up in .*think"),
        (SAME, {"worker0": stack("a"), "worker1": stack("b")}, {}, "different orders"),
        (SAME, {"worker0": stack("a"), "worker1": stack("a")}, {}, None),
        (SAME, {}, {"worker0": (), "worker1": ()}, None),
    ],
)
def test_what_is_likely_follows_from_what_is_seen(steps, found, ends, cause):
    told = likely_cause(steps, found, {name: [] for name in found} | ends)
    assert (told is None) if cause is None else re.search(cause, told)


def test_one_that_is_behind_and_idle_is_named(monkeypatch, folder, members):
    pids = {"worker0": members(IDLE), "worker1": members(IDLE)}
    said = told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 8})
    assert "worker1 is behind, at step 8, and idle, and worker0 waits" in said[0]


def test_one_without_whom_the_others_go_on_is_no_cause(monkeypatch, folder, members):
    pids = {name: members(IDLE) for name in ("worker0", "worker2")} | {"worker1": members("pass")}
    wait_for(lambda: psutil.Process(pids["worker1"]).status() == psutil.STATUS_ZOMBIE)
    steps = {"worker0": 9, "worker1": 8, "worker2": 9}
    said = told(monkeypatch, folder, pids, steps, lost={"worker1": 1.0})
    assert "every member is idle at step 9" in said[0]
    assert "worker1" not in said[0]
    assert "uneven" not in said[0]


def test_one_that_is_ahead_of_another_that_makes_its_steps_is_done(monkeypatch, folder, members):
    """In `async` the quick worker's script ends first; the slow one is behind, and not idle."""
    pids = {"worker0": members(IDLE), "worker1": members(IDLE)}
    steps = {"worker0": 90, "worker1": count(2)}
    assert not told(monkeypatch, folder, pids, steps, looks=9)


def test_one_that_stands_still_while_others_go_on_is_named_alone(monkeypatch, folder, members):
    pids = {"worker0": members(IDLE), "worker1": members(IDLE), "worker2": members(IDLE)}
    steps = {"worker0": 90, "worker1": 8, "worker2": count(9)}
    said = told(monkeypatch, folder, pids, steps)
    assert "worker1 is behind, at step 8, and idle" in said[0]
    assert "waits" not in said[0]


def test_one_that_has_done_all_its_steps_does_not_stand_still(monkeypatch, folder, members):
    asked = spec.Experiment(workload=spec.Workload(steps=50))
    monkeypatch.setattr(RunFolder, "experiment", lambda folder: asked)
    pids = {"worker0": members(IDLE), "worker1": members(IDLE)}
    said = told(monkeypatch, folder, pids, {"worker0": 50, "worker1": 30})
    assert "worker1 is behind, at step 30, and idle" in said[0]
    assert "waits" not in said[0]


def test_one_that_computes_between_two_steps_is_left_alone(monkeypatch, folder, members):
    pids = {"worker0": members(BUSY), "worker1": members(IDLE)}
    assert not told(monkeypatch, folder, pids, {"worker0": 9, "worker1": 9}, looks=6)


def test_behind_the_last_step_nothing_is_unusual(monkeypatch, folder, members):
    last = folder.experiment().workload.steps or 50
    monkeypatch.setattr(
        RunFolder, "experiment", lambda folder: spec.Experiment(workload=spec.Workload(steps=last))
    )
    pids = {"worker0": members(IDLE), "worker1": members(IDLE)}
    assert not told(monkeypatch, folder, pids, {"worker0": last, "worker1": last}, looks=6)


def test_before_the_first_step_nothing_is_unusual(monkeypatch, folder, members):
    said = []
    monkeypatch.setattr(stalls, "LEAST_SECONDS", 1.0)
    watched = Stalls(folder, said.append)
    watched.started("worker0", members(IDLE))
    for _ in range(4):
        watched()
        time.sleep(1.02)
    assert not said
