"""Jobs of trainers, observed as docs/observe.md says; skipped where a trainer is missing."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.observe import lightning
from tests.observe.jobs import job, observed

pytestmark = pytest.mark.timeout(450)

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = {"lightning": 20, "accelerate": 10, "transformers": 20}


@pytest.mark.parametrize("trainer", STEPS)
def test_a_trainers_job_is_observed_as_it_is(trainer, tmp_path):
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed: pip install 'paceline[{trainer}]'")
    script = SCRIPTS / f"with_{trainer}.py"
    # Lightning takes the ranks from the environment where torchrun says that it made it.
    given = {"TORCHELASTIC_RUN_ID": "test"}
    ended = job(2, str(tmp_path / "out"), script=script, out=tmp_path / "run", **given)
    assert ended.statuses == (0, 0), ended.errors
    run = observed(tmp_path / "run")
    summary = run.summary()
    assert (summary.status, summary.architecture, summary.workers) == ("finished", "ddp", 2)
    assert summary.steps == STEPS[trainer]
    for member in run.members():
        steps = run.steps(member.name)
        assert all(step.loss is not None for step in steps)
        samples = 32 if trainer == "accelerate" else 16
        assert {step.samples for step in steps[1:]} == {samples}
        assert steps[-1].breakdown_seconds.keys() >= {"input", "forward", "backward", "update"}


def test_torchrun_runs_it_as_a_module(tmp_path):
    script = SCRIPTS.parents[2] / "benchmarks" / "foreign" / "job.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "paceline.observe", "--out", str(tmp_path / "run")]
    command += [str(script), "--steps", "8", "--width", "32"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "read more: paceline explain" in ended.stderr
    assert observed(tmp_path / "run").summary().steps == 8


def test_lightning_asks_for_nothing_without_a_folder(monkeypatch):
    monkeypatch.delenv("PACELINE_OBSERVE", raising=False)
    assert lightning.callbacks() == []
    assert "paceline.observe.session" not in sys.modules or not _is_observed()


def _is_observed() -> bool:
    from paceline.observe.session import observation

    return observation() is not None
