"""The live page: what it reads, who may see it, and what a browser shows of it."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from itertools import pairwise

import msgspec
import pytest

from paceline import spec
from paceline.errors import SpecError
from paceline.record import MemberRecord, RecordedEvent, RunFolder, Step
from paceline.report import live
from paceline.report.tail import HISTORY, SILENT_SECONDS, History, RunTail
from paceline.wire.listener import AT_ONCE
from tests.support import webdriver
from tests.support.synthetic import Times, synchronous_run

MEMBER = """
import sys, time
from pathlib import Path
from paceline.record import RunFolder, Step
from paceline.telemetry import Recorder
folder, name = RunFolder(Path(sys.argv[1])), sys.argv[2]
with Recorder(folder, name=name, role="worker", host="here", sample_seconds=0.2) as recorder:
    for step in range(100_000):
        start = time.monotonic()
        time.sleep(0.05)
        end = time.monotonic()
        parts = {"forward": 0.4 * (end - start), "backward": 0.6 * (end - start)}
        recorder.add_step(Step(step=step, start_seconds=start, end_seconds=end, samples=8,
                               breakdown_seconds=parts, ready_seconds=end, loss=2 / (1 + step)))
"""


@pytest.fixture
def folder(tmp_path):
    experiment = spec.Experiment(
        cluster=spec.Cluster(workers=2),
        architecture=spec.Ring(),
        measurement=spec.Measurement(sample_seconds=0.2),
    )
    return RunFolder.create(tmp_path / "run", experiment)


@pytest.fixture
def start_member(folder):
    """Starts members that record steps as workers do; all are gone after the test."""
    with ExitStack() as stack:

        def start(name):
            argv = [sys.executable, "-c", MEMBER, str(folder.path), name]
            process = stack.enter_context(subprocess.Popen(argv))
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.skipif(webdriver.MISSING is not None, reason=str(webdriver.MISSING))
def test_a_browser_sees_numbers_move_and_a_killed_worker_turn_red(folder, start_member, tmp_path):
    start_member("worker0")
    victim = start_member("worker1")
    address, stop = live.serve(folder.path, look_seconds=0.3)
    try:
        with webdriver.browser(tmp_path / "profile") as browser:
            browser.open(address)
            browser.wait("both workers", lambda: bool(browser.text("#member-worker1")))
            browser.wait("a first step", lambda: browser.text("#step") not in ("–", "0", ""))
            first = int(browser.text("#step").replace(",", ""))
            loss = browser.text("#loss")
            browser.wait(
                "steps moving", lambda: int(browser.text("#step").replace(",", "")) > first
            )
            browser.wait("the loss moving", lambda: browser.text("#loss") != loss)
            state = "#member-worker1 td:nth-child(2)"
            browser.wait("it running", lambda: browser.text(state) == "running")
            victim.send_signal(signal.SIGKILL)
            browser.wait("a dead worker", lambda: browser.text(state) in ("silent", "failed"))
            colour = "getComputedStyle(document.querySelector('#member-{} td')).color"
            red, green, blue = _channels(browser.run(colour.format("worker1")))
            assert red > 150
            assert red > 2 * max(green, blue)
            assert browser.run(colour.format("worker0")) != browser.run(colour.format("worker1"))
            assert browser.text("#member-worker0 td:nth-child(2)") == "running"
            assert browser.text("#status") == "a member is lost"
            assert browser.logged_errors() == []
    finally:
        stop()


def test_nobody_sees_a_run_without_the_token(folder):
    address, stop = live.serve(folder.path)
    try:
        bare = address.partition("?")[0]
        for path in ("", "events", "?token=wrong", "events?token=wrong"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(bare + path, timeout=10)
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert b"Paceline" in answer.read()
    finally:
        stop()


@pytest.mark.parametrize(
    "path", ["/?token=", "/?token=%C3%BC", "/events?token=%00%FF", "/events?token=x&token="]
)
def test_no_other_token_opens_it(folder, path):
    address, stop = live.serve(folder.path)
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(address.partition("/?")[0] + path, timeout=10)
        assert caught.value.code == 403
    finally:
        stop()


def test_another_name_that_leads_here_opens_nothing(folder):
    address, stop = live.serve(folder.path)
    try:
        request = urllib.request.Request(address, headers={"Host": "elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        assert caught.value.code == 403
    finally:
        stop()


def test_those_who_call_and_say_nothing_are_few_and_the_page_stays_open(folder):
    address, stop = live.serve(folder.path, look_seconds=0.1)
    port = int(address.partition("127.0.0.1:")[2].partition("/")[0])
    events = address.replace("/?", "/events?")
    with ExitStack() as stack:
        stack.callback(stop)
        page = stack.enter_context(urllib.request.urlopen(events, timeout=10))
        silent = []
        for _ in range(AT_ONCE + 50):
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)))
            silent[-1].sendall(b"GET / HTTP/1.1")
        silent[0].settimeout(2.0)  # less than what one alone would be given
        with suppress(ConnectionResetError):  # the same, where it had not read what was said
            assert silent[0].recv(100) == b""
        silent[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            silent[-1].recv(100)
        for _ in range(5):
            assert page.readline().startswith(b"data: ")
            page.readline()


def test_a_taken_port_is_bad_input(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SpecError, match="leave it out for a free one"):
            live.serve(folder.path, taken.getsockname()[1])


def test_events_carry_the_state_of_the_run(tmp_path):
    run = synchronous_run(tmp_path / "run", slow={"worker1": Times(forward=0.05)})
    address, stop = live.serve(run.path)
    try:
        with urllib.request.urlopen(address.replace("/?", "/events?"), timeout=10) as answer:
            state = json.loads(answer.readline().removeprefix(b"data: "))
    finally:
        stop()
    assert state["status"] == "finished"
    assert state["step"] == 40
    late = {member["name"]: member["late_ms"] for member in state["members"]}
    assert late["worker1"] == pytest.approx(40, rel=0.1)
    assert late["worker0"] == pytest.approx(0, abs=1)
    assert state["breakdown_ms"]["wait"] > 10


def test_a_look_reads_only_what_is_new(folder, monkeypatch):
    """64 members: after the first look, a second one decodes just the lines added since."""
    for rank in range(64):
        _write_steps(folder, f"worker{rank}", range(20))
    tail = RunTail(folder)
    assert tail.look()["step"] == 20
    _write_steps(folder, "worker7", range(20, 22))
    decoded = []
    original = RunTail._add_loss
    monkeypatch.setattr(
        RunTail, "_add_loss", lambda self, step: decoded.append(step) or original(self, step)
    )
    assert tail.look()["step"] == 22
    assert [step.step for step in decoded] == [20, 21]


def test_a_line_in_the_making_waits(folder):
    _write_steps(folder, "worker0", range(3))
    file = folder.path / "members" / "worker0.steps.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    tail = RunTail(folder)
    assert tail.look()["step"] == 2
    file.write_bytes(whole)
    assert tail.look()["step"] == 3


def test_a_member_is_silent_only_while_others_move(folder, monkeypatch):
    for name in ("worker0", "worker1"):
        _write_steps(folder, name, range(3))
    tail, now = RunTail(folder), time.monotonic()
    assert _states(tail) == {"worker0": "running", "worker1": "running"}
    monkeypatch.setattr(time, "monotonic", lambda: now + SILENT_SECONDS + 1)
    assert _states(tail) == {"worker0": "running", "worker1": "running"}
    _write_steps(folder, "worker0", range(3, 5))
    assert _states(tail) == {"worker0": "running", "worker1": "silent"}


def test_a_lost_member_is_told_from_those_ended_with_it(folder):
    for name in ("worker0", "worker1"):
        _write_steps(folder, name, range(3))
    folder.add_event(RecordedEvent(time_seconds=0, member="worker1", kind="lost", text="killed"))
    summary = folder.summary()
    summary.status = "failed"
    folder.write_summary(summary)
    assert _states(RunTail(folder)) == {"worker0": "ended", "worker1": "failed"}


def test_a_page_that_is_opened_late_shows_all_that_was(folder):
    for name in ("worker0", "worker1"):
        _write_steps(folder, name, range(30))
    state = RunTail(folder).look()
    times = [seconds for seconds, _ in state["rate"]]
    assert times[-1] > 20
    assert all(rate == pytest.approx(16, rel=0.4) for _, rate in state["rate"])
    assert len(state["loss"]) == 30


def test_a_run_that_goes_on_has_a_verdict_so_far(folder):
    _write_steps(folder, "worker0", range(30))
    assert RunTail(folder).look()["verdict"].startswith("So far: ")


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path):
    path = tmp_path / "later"
    watching = subprocess.Popen(
        [sys.executable, "-m", "paceline", "watch", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "waiting for" in watching.stderr.readline()
        RunFolder.create(path, spec.Experiment())
        assert "watching" in watching.stdout.readline()
    finally:
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=30)


def test_a_long_history_is_thinned_evenly():
    history = History()
    for x in range(10 * HISTORY):
        history.add(x, x)
    xs = [x for x, _ in history.points]
    assert HISTORY / 2 <= len(xs) <= HISTORY
    assert xs[0] == 0
    gaps = {after - before for before, after in pairwise(xs)}
    assert len(gaps) <= 2


def _states(tail):
    return {member["name"]: member["status"] for member in tail.look()["members"]}


def _write_steps(folder, name, numbers):
    folder.write_member(MemberRecord(name=name, role="worker", host="here"))
    with (folder.path / "members" / f"{name}.steps.jsonl").open("ab") as file:
        for number in numbers:
            step = Step(
                step=number,
                start_seconds=number,
                end_seconds=number + 1,
                breakdown_seconds={"forward": 1.0},
                samples=8,
                loss=1.0,
            )
            file.write(msgspec.json.encode(step) + b"\n")


def _channels(colour):
    return [int(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
