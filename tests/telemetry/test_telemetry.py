"""Where time goes, and what the kernel counted."""

import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from paceline import spec
from paceline.errors import RecordError
from paceline.record import RunFolder, Step
from paceline.telemetry import Recorder, StepClock
from paceline.telemetry.network import SocketTraffic


@pytest.fixture
def clock(monkeypatch):
    """A step clock on a hand-moved time."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = StepClock()

    def spend(phase, seconds):
        clock.enter(phase)
        now[0] += seconds

    return clock, spend, now


def test_every_moment_belongs_to_one_phase(clock):
    clock, spend, _ = clock
    spend("input", 1.0)
    spend("other", 0.25)
    spend("forward", 2.0)
    spend("backward", 3.0)
    spend("update", 0.5)
    step = clock.end_step(7, 32)
    assert step.breakdown_seconds == {"input": 1.0, "forward": 2.0, "backward": 3.0, "update": 0.5}
    assert step.end_seconds - step.start_seconds == pytest.approx(6.75)
    assert (step.step, step.samples, step.ready_seconds) == (7, 32, None)


def test_backward_ends_when_the_last_gradient_is_ready(clock):
    clock, spend, now = clock
    spend("backward", 3.0)
    clock.ready()
    now[0] += 2.0
    spend("update", 1.0)
    step = clock.end_step(0, 1)
    assert step.breakdown_seconds == {"backward": 3.0, "exchange_exposed": 2.0, "update": 1.0}
    assert step.ready_seconds == 103.0


def test_a_pause_belongs_to_no_step(clock):
    clock, spend, now = clock
    spend("forward", 1.0)
    with clock.paused():
        now[0] += 50.0
    step = clock.end_step(0, 1)
    assert step.end_seconds - step.start_seconds == pytest.approx(1.0)


def test_charging_moves_time_between_phases(clock):
    clock, spend, _ = clock
    spend("forward", 3.0)
    clock.charge("exchange_exposed", 2.0)
    assert clock.end_step(0, 1).breakdown_seconds == {"forward": 1.0, "exchange_exposed": 2.0}


def test_a_wait_after_the_last_gradient_is_counted_once(clock):
    clock, spend, now = clock
    spend("backward", 3.0)
    clock.ready()
    now[0] += 2.0
    clock.charge("exchange_exposed", 2.0)  # as one who waited inside backward does
    spend("update", 1.0)
    step = clock.end_step(0, 1)
    assert step.breakdown_seconds == {"backward": 3.0, "exchange_exposed": 2.0, "update": 1.0}


def test_a_phase_within_another_takes_its_time_and_no_more(clock):
    clock, spend, now = clock
    spend("forward", 1.0)
    with clock.within("exchange_exposed"):
        now[0] += 2.0
    now[0] += 4.0
    with clock.paused(), clock.within("exchange_exposed"):
        now[0] += 50.0
    assert clock.end_step(0, 1).breakdown_seconds == {"forward": 5.0, "exchange_exposed": 2.0}


def test_the_kernel_counts_what_a_process_sends():
    traffic = SocketTraffic()
    before = traffic.read()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        one.sendall(b"x" * 100_000)
        left = 100_000
        while left:
            left -= len(other.recv(left))
        after = traffic.read()
    # Both ends are this process's, so what one sent the other received.
    assert after.bytes_sent - before.bytes_sent >= 100_000
    assert after.bytes_received - before.bytes_received >= 100_000
    assert after.packets_sent > before.packets_sent
    assert traffic.read().bytes_sent >= after.bytes_sent  # closed sockets stay counted


def test_a_recorder_leaves_steps_samples_and_totals(tmp_path):
    folder = RunFolder.create(tmp_path / "run", spec.Experiment())
    clock = StepClock()
    with Recorder(folder, name="worker0", role="worker", host="h", sample_seconds=0.05) as recorder:
        for number in range(3):
            clock.enter("forward")
            recorder.add_step(clock.end_step(number, 4))
        recorder.note("something fell back")
        deadline = time.monotonic() + 60
        while len(folder.series("worker0")) < 3 or not folder.steps("worker0"):
            assert time.monotonic() < deadline, "nothing is recorded while it goes"
            time.sleep(0.02)
    assert [entry.step for entry in folder.steps("worker0")] == [0, 1, 2]
    series = folder.series("worker0")
    assert len(series) >= 4, "and one at the end"
    assert all(sample.rss_bytes > 10**6 for sample in series)
    member = folder.members()[0]
    assert member.status == "finished"
    assert member.cpu_fraction is not None
    assert folder.events()[0].text == "something fell back"


def test_a_failed_member_says_so(tmp_path):
    folder = RunFolder.create(tmp_path / "run", spec.Experiment())
    with (
        pytest.raises(ValueError, match="boom"),
        Recorder(folder, name="worker0", role="worker", host="h"),
    ):
        raise ValueError("boom")
    assert folder.members()[0].status == "failed"


def test_a_full_disk_is_told_to_the_one_who_trains(tmp_path):
    folder = RunFolder.create(tmp_path / "run", spec.Experiment())

    def train() -> None:
        clock, deadline = StepClock(), time.monotonic() + 20
        with Recorder(folder, name="w0", role="worker", host="h", sample_seconds=0.05) as recorder:
            while time.monotonic() < deadline:
                recorder.add_step(clock.end_step(0, 1))
                time.sleep(0.01)

    (folder.path / "members" / "w0.series.jsonl").symlink_to("/dev/full")
    with pytest.raises(RecordError, match=r"run cannot be written: No space left on device\."):
        train()
    assert folder.members()[0].status == "failed"


def test_what_comes_before_the_first_batch_is_no_step(clock):
    clock, spend, now = clock
    now[0] += 30.0
    spend("input", 1.0)
    step = clock.end_step(0, 1)
    assert step.seconds == pytest.approx(1.0)


def test_pauses_are_named_and_the_last_ones_kept(clock):
    clock, spend, now = clock
    spend("forward", 1.0)
    with clock.paused("checkpoint"):
        now[0] += 5.0
        clock.enter("evaluation")  # what a pause does inside is its own
    spend("evaluation", 2.0)
    spend("update", 0.5)
    step = clock.end_step(0, 1)
    assert step.paused_seconds == {"checkpoint": 5.0, "evaluation": 2.0}
    assert step.seconds == pytest.approx(1.5)
    spend("evaluation", 3.0)
    assert clock.end_training() == {"evaluation": 3.0}


def test_a_loss_that_is_no_number_survives_the_file(tmp_path):
    folder = RunFolder.create(tmp_path / "run", spec.Experiment())
    with Recorder(folder, name="worker0", role="worker", host="a") as recorder:
        for number, loss in enumerate((1.0, float("nan"), float("inf"))):
            parts = {"forward": 1.0}
            entry = Step(step=number, start_seconds=0, end_seconds=1, breakdown_seconds=parts,
                         samples=1, loss=loss)  # fmt: skip
            recorder.add_step(entry)
    losses = [step.loss for step in folder.steps("worker0")]
    assert losses[0] == 1.0
    assert all(math.isnan(loss) for loss in losses[1:])


def test_samples_say_who_waited_for_a_core(tmp_path):
    folder = RunFolder.create(tmp_path / "run", spec.Experiment())
    with Recorder(folder, name="worker0", role="worker", host="a", sample_seconds=0.1):
        time.sleep(0.3)
    sample = folder.series("worker0")[-1]
    assert sample.machine_cpu_fraction >= 0
    assert sample.available_bytes > 0
    member = folder.members()[0]
    assert member.began_seconds < member.ended_seconds


def test_child_processes_count_with_the_member_that_started_them(tmp_path):
    """A loader's reading processes, and theirs, use the cores that training waits for."""
    source = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    busy = "while True: pass"
    folder = RunFolder.create(tmp_path / "run", spec.Experiment())
    with Recorder(folder, name="worker0", role="worker", host="here", sample_seconds=0.1):
        child = subprocess.Popen([sys.executable, "-c", source, busy], start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            while not any((s.children_cpu_fraction or 0) > 0.1 for s in folder.series("worker0")):
                assert time.monotonic() < deadline, "no sample counts the grandchild"
                time.sleep(0.05)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    samples = folder.series("worker0")
    assert all(s.cpu_fraction >= (s.children_cpu_fraction or 0) - 1e-6 for s in samples)
