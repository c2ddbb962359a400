"""Jobs that never import Paceline: observed, they do the same, and leave a run folder."""

import os
import signal
import time

import pytest

from paceline.explain import explain
from paceline.observe.finish import refresh
from tests.observe.jobs import begin, job, observed, wait

pytestmark = pytest.mark.timeout(450)

KINDS = {
    "ddp": ("ddp", ("--kind", "ddp", "--norm", "--groups")),
    "accumulate": ("ddp", ("--kind", "accumulate")),
    "fsdp2": ("fsdp2", ("--kind", "fsdp2")),
    "plain": ("collectives", ("--kind", "plain")),
    "compiled": ("ddp", ("--kind", "ddp", "--compile")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_trains_bit_by_bit_as_before_and_leaves_a_record(kind, tmp_path):
    architecture, given = KINDS[kind]
    given = (*given, "--steps", "9", "--width", "64")
    plain = job(2, *given)
    seen = job(2, *given, out=tmp_path / "run")
    assert plain.statuses == seen.statuses == (0, 0), seen.errors
    assert len(plain.weights) == 2
    assert plain.weights == seen.weights
    run = observed(tmp_path / "run")
    summary = run.summary()
    assert (summary.status, summary.engine) == ("finished", "observe")
    assert (summary.architecture, summary.workers, summary.steps) == (architecture, 2, 9)
    assert [member.name for member in run.members()] == ["rank0", "rank1"]
    for member in run.members():
        own = run.steps(member.name)
        assert len(own) == 9
        assert all(step.samples == 32 and step.loss is not None for step in own)
        assert own[8].breakdown_seconds.keys() >= {"input", "forward", "backward", "update"}
        calls = run.collectives(member.name)
        assert len(calls) >= 9
        assert any(call.ended_seconds is not None for call in calls)
    numbers = [{(c.group, c.number) for c in run.collectives(m.name)} for m in run.members()]
    assert numbers[0] == numbers[1]
    assert explain(run).worker.startswith("rank")


def test_one_process_without_a_group(tmp_path):
    given = ("--kind", "single", "--steps", "9", "--plant", "input", "--seconds", "0.2")
    plain, seen = job(1, *given), job(1, *given, out=tmp_path / "run")
    assert plain.weights == seen.weights
    found = explain(observed(tmp_path / "run"))
    assert found.architecture == "single"
    assert "input" in [cause.name for cause in found.causes]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "plain"])
def test_a_rank_that_is_late_in_backward_is_named(kind, tmp_path):
    given = ("--kind", kind, "--plant", "late-backward", "--seconds", "0.3", "--width", "32")
    ended = job(2, *given, "--steps", "14", out=tmp_path / "run")
    assert ended.statuses == (0, 0), ended.errors
    found = explain(observed(tmp_path / "run"))
    assert found.late is not None
    assert (found.late.worker, found.late.reason) == ("rank1", "compute")
    assert found.late.seconds == pytest.approx(0.3, rel=0.3)
    assert found.causes[0].name == "slow-worker"
    changes = [action.change for action in found.actions]
    assert kind != "fsdp2" or not any("architecture" in change for change in changes)


@pytest.mark.parametrize(("plant", "status"), [("status", 7), ("raise", 1)])
def test_exit_status_stays(plant, status, tmp_path):
    given = ("--kind", "single", "--steps", "8", "--plant", plant, "--width", "32")
    plain, seen = job(1, *given), job(1, *given, out=tmp_path / "run")
    assert plain.statuses == seen.statuses == (status,)
    summary = observed(tmp_path / "run").summary()
    assert summary.status == ("failed" if plant == "raise" else "finished")
    if plant == "raise":
        assert "ValueError: a bad batch" in seen.errors[0]
        assert "ValueError: a bad batch" in (summary.verdict or "")


def test_a_hang_is_told_while_it_lasts_and_a_signal_still_ends_it(tmp_path):
    given = ("--plant", "hang", "--steps", "12", "--width", "32")
    processes = begin(2, *given, out=tmp_path / "run", PACELINE_OBSERVE_STALL="3")
    until = time.monotonic() + 150
    events = tmp_path / "run" / "events.jsonl"
    while time.monotonic() < until and not (events.exists() and "rank 1" in events.read_text()):
        time.sleep(0.2)
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    ended = wait(processes)
    assert ended.statuses == (-signal.SIGTERM, -signal.SIGTERM)
    assert "rank 0 waits in all_reduce number" in ended.errors[0]
    assert "for rank 1. rank 1 is at job.py, line" in ended.errors[0]
    assert "no progress" not in ended.errors[1]
    run = observed(tmp_path / "run")
    refresh(run)
    found = explain(run)
    assert found.causes[0].name == "failed"
    assert "rank 0 waits in all_reduce" in found.verdict


def test_a_folder_that_cannot_be_made_costs_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    given = ("--steps", "6", "--width", "32")
    plain, seen = job(2, *given), job(2, *given, out=tmp_path / "file" / "run")
    assert plain.weights == seen.weights
    assert seen.statuses == (0, 0)
    told = [line for text in seen.errors for line in text.splitlines() if "paceline" in line]
    assert len(told) == 1
    assert "is no longer observed" in told[0]
    assert "the job continues" in told[0]


def test_a_script_asks_by_itself(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import paceline.observe, torch\n"
        f"paceline.observe({str(tmp_path / 'run')!r})\n"
        "net = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.Adam(net.parameters())\n"
        "for _ in range(8):\n"
        "    optimizer.zero_grad(); net(torch.ones(3, 4)).sum().backward(); optimizer.step()\n"
    )
    ended = job(1, script=script)
    assert ended.statuses == (0,), ended.errors
    summary = observed(tmp_path / "run").summary()
    assert (summary.steps, summary.architecture) == (8, "single")
    assert summary.loss is not None


def test_a_script_of_pacelines_is_recorded_by_its_own_session(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import paceline, torch\n"
        "paceline.init()\n"
        "torch.manual_seed(0)\n"
        "net = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.01)\n"
        "net, optimizer = paceline.distribute(net, optimizer)\n"
        "for _ in range(7):\n"
        "    optimizer.zero_grad(); net(torch.ones(3, 4)).sum().backward(); optimizer.step()\n"
    )
    seen = job(2, script=script, PACELINE_OBSERVE=str(tmp_path / "run"))
    assert seen.statuses == (0, 0), seen.errors
    run = observed(tmp_path / "run")
    summary = run.summary()
    assert (summary.status, summary.steps, summary.workers) == ("finished", 7, 2)
    assert summary.engine == "here"
    assert [member.name for member in run.members()] == ["worker0", "worker1"]
    silent = job(2, script=script)
    assert silent.statuses == (0, 0)
    assert "this job leaves no record" in silent.errors[0]
    assert "PACELINE_OBSERVE=FOLDER" in silent.errors[0]
    assert "no record" not in silent.errors[1]
