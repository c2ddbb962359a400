"""One experiment, started four ways: the same workers, the same loss curve, one JSON object."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import record

BIN = Path(sys.executable).parent
TRAIN = ["-m", "paceline", "train", "experiment.toml", "--json", "--out", "run"]
EXPERIMENT = """
architecture = "ring"
[workload]
model = "mnist-dnn"
data = "synthetic"
global_batch = 16
steps = 6
[cluster]
workers = 2
threads = 1
[measurement]
warmup_steps = 1
"""


def local() -> list[str]:
    return [sys.executable, *TRAIN]


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *TRAIN]


def mpirun() -> list[str]:
    program = shutil.which("mpirun", path=str(BIN)) or shutil.which("mpirun")
    if program is None:
        pytest.skip("needs the extra paceline[mpi]")
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [program, *options, "-n", "2", sys.executable, *TRAIN]


LAUNCHERS: dict[str, Callable[[], list[str]]] = {"torchrun": torchrun, "mpirun": mpirun}


def losses(line: list[str], folder: Path) -> list[float]:
    """Run the experiment in `folder`; the loss of every step, after checking what was printed."""
    folder.mkdir()
    (folder / "experiment.toml").write_text(EXPERIMENT)
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["workers"], printed["status"]) == (2, "finished")
    steps = record.RunFolder(folder / "run").steps("worker0")
    return [step.loss for step in steps if step.loss is not None]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(local(), tmp_path_factory.mktemp("local") / "job")


@pytest.mark.parametrize("name", ["mpirun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_same_loss_curve(name: str, reference: list[float], tmp_path: Path) -> None:
    assert len(reference) == 6
    assert len(set(reference)) > 1
    assert losses(LAUNCHERS[name](), tmp_path / "job") == pytest.approx(reference, rel=1e-6)


@pytest.mark.slow
def test_same_loss_curve_on_ray(ray_cluster: str, reference: list[float], tmp_path: Path) -> None:
    line = [*local(), "--launcher", "ray"]
    assert losses(line, tmp_path / "job") == pytest.approx(reference, rel=1e-6)


SCRIPT = """
import os
import paceline
session = paceline.init()
who = session.identity
os.write(1, f"{who.name} {who.workers} {session.options}\\n".encode())  # a line in one piece
"""


def test_a_script_under_torchrun_takes_the_architecture_from_the_command_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    line = [*start, "-m", "paceline", "run", "--architecture", "ring:backend=gloo", "script.py"]
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines())
    assert [text.partition(" Ring(")[0] for text in said] == ["worker0 2", "worker1 2"]


def test_the_last_members_of_mpirun_are_servers(tmp_path: Path) -> None:
    flags = ["--model", "mnist-dnn", "--data", "synthetic", "--steps", "3", "--threads", "1"]
    flags += ["--global-batch", "8", "--architecture", "server", "--servers", "1", "--json"]
    program, *options = mpirun()
    options[options.index("-n") + 1] = "3"
    line = [program, *options[: options.index("-m") + 1], "paceline", "train", *flags]
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["workers"], printed["servers"]) == (2, 1)
    assert [member["name"] for member in printed["members"]] == ["worker0", "worker1", "server0"]
