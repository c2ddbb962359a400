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
SECONDS = 200.0


def asked(**workload):
    experiment = spec.Experiment(
        architecture=spec.parse_architecture("server"),
        cluster=spec.Cluster(workers=2, servers=1),
        workload=spec.Workload(
            model="tests.support.user_models:that_stays_at_step_100",
            input_shape=(123,),
            data="synthetic",
            global_batch=16,
            steps=200,
            checkpoint_every=40,
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


def recorded(run):
    """Whether all steps before 99 are in the record, which is written a moment after them."""
    workers = [RunFolder(run).steps(worker) for worker in ("worker0", "worker1")]
    return all(any(step.step == 98 for step in steps) for steps in workers)


@pytest.mark.timeout(600)
def test_a_run_whose_launcher_was_killed_goes_on_exactly(tmp_path):
    run, question = tmp_path / "run", tmp_path / "question.toml"
    question.write_text(spec.to_toml(asked()), encoding="utf-8")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(question), str(run)])
    try:
        wait_for((run / "checkpoints" / "step-00000080.json").exists, launcher)
        wait_for(lambda: recorded(run), launcher)
        members = psutil.Process(launcher.pid).children()
    finally:
        launcher.kill()
        launcher.wait()
    _, alive = psutil.wait_procs(members, timeout=60)
    assert len(members) == 3
    assert not alive, "members end with their launcher"
    saved = checkpoints.choose(run).manifest.step
    told = failure(RunFolder(run))
    assert saved == 80
    assert f"--resume {run} goes on after step {saved}" in told

    last = 99
    resumed = engines.run(spec.replace(asked(), resume=str(run), steps=last), tmp_path / "resumed")
    before, after = losses(RunFolder(run)), losses(resumed)
    assert sorted(after) == list(range(saved, last))
    assert {step: before[step] for step in after} == after, "what came after it is done again"


def losses(run):
    return record.losses_of(run)
