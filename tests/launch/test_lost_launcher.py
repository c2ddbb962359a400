"""The launcher itself is killed: nobody is left behind, and the checkpoint goes on exactly."""

import subprocess
import sys
import time

import psutil
import pytest

from paceline import engines, record, spec
from paceline.bench import drill
from paceline.explain.failure import failure
from paceline.record import RunFolder, checkpoints

LAUNCHER = """
import sys
from pathlib import Path
from paceline import engines, spec
engines.run(spec.load(Path(sys.argv[1])), Path(sys.argv[2]))
"""
SECONDS = 90.0


def asked(**workload):
    experiment = spec.Experiment(
        architecture=spec.parse_architecture("server"),
        cluster=spec.Cluster(workers=2, servers=1),
        workload=spec.Workload(
            model="adult-dnn",
            data="synthetic",
            global_batch=16,
            steps=100_000,
            checkpoint_every=400,  # seconds apart: the record is written a moment after the step
            **workload,
        ),
    )
    return drill.with_faults(experiment, ())


def wait_for(condition, launcher):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        assert launcher.poll() is None, "it ends by itself before it could be killed"
        time.sleep(0.02)


def past_the_newest(run):
    return RunFolder(run).steps("worker0")[-1].step > checkpoints.choose(run).manifest.step + 10


@pytest.mark.timeout(300)
def test_a_run_whose_launcher_was_killed_goes_on_exactly(tmp_path):
    run, question = tmp_path / "run", tmp_path / "question.toml"
    question.write_text(spec.to_toml(asked()), encoding="utf-8")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(question), str(run)])
    try:
        wait_for((run / "checkpoints" / "step-00000400.json").exists, launcher)
        wait_for(lambda: past_the_newest(run), launcher)
        members = psutil.Process(launcher.pid).children()
    finally:
        launcher.kill()
        launcher.wait()
    _, alive = psutil.wait_procs(members, timeout=10)
    assert len(members) == 3
    assert not alive, "members end with their launcher"
    saved = checkpoints.choose(run).manifest.step
    told = failure(RunFolder(run))
    assert f"--resume {run} goes on after step {saved}" in told

    last = saved + 60
    resumed = engines.run(spec.replace(asked(), resume=str(run), steps=last), tmp_path / "resumed")
    before, after = losses(RunFolder(run)), losses(resumed)
    again = before.keys() & after.keys()
    assert again, "steps that came after the checkpoint were done again"
    assert {step: before[step] for step in again} == {step: after[step] for step in again}
    assert sorted(after) == list(range(saved, last))


def losses(run):
    return record.losses_of(run)
