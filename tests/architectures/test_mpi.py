"""`ring` and `average` over MPI train like one worker; a lost rank costs its own part of a step."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from paceline import architectures, data, spec
from paceline.errors import MemberError
from paceline.testing import run_members
from tests.support.curves import (
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    largest_difference,
    loss_curve,
    samples,
    small_model,
    whole,
)

MPIRUN = Path(sys.executable).with_name("mpirun")
ROOT = Path(__file__).resolve().parents[2]

DEADLINE_SECONDS = 200
"""Four interpreters that import torch take long to start on two busy cores."""

pytestmark = pytest.mark.timeout(DEADLINE_SECONDS + 40)
pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install paceline[mpi]")
needs_mpirun = pytest.mark.skipif(
    not (MPIRUN.exists() or shutil.which("mpirun")), reason="mpirun is not installed"
)


def run_ranks(
    folder: Path,
    workers: int,
    architecture: spec.Architecture,
    *flags: str,
    shares: tuple[float, ...] = (),
    lose: str = "",
) -> dict[int, dict]:
    """The results of the ranks that lived to write one."""
    environment = {
        **os.environ,
        **architectures.to_environment(architecture),
        "MPI_TEST_SHARES": ",".join(map(str, shares or [1.0] * workers)),
        "PYTHONPATH": str(ROOT),
    }
    if lose:
        environment["MPI_TEST_LOSE"] = lose
    program = [sys.executable, "-m", "tests.support.mpi_program", str(folder)]
    run_mpirun(folder, workers, flags, program, environment)
    return {int(f.stem): json.loads(f.read_text()) for f in folder.glob("[0-9]*.json")}


def run_mpirun(
    folder: Path, workers: int, flags: tuple[str, ...], program: list[str], env: dict[str, str]
) -> str:
    mpirun = str(MPIRUN) if MPIRUN.exists() else "mpirun"
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    command = [mpirun, *as_root, "--oversubscribe", *flags, "-n", str(workers), *program]
    process = subprocess.Popen(
        command,
        # A killed rank's shared segment stays; it must not stay in /dev/shm.
        env={**env, "TMPDIR": str(folder), "OMPI_MCA_btl_sm_backing_directory": str(folder)},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, errors[-3000:]
    return output


def curve_by_hand(shares: list[float], lost: int = -1, lost_at: int = STEPS) -> np.ndarray:
    """One worker on the whole batch; in step `lost_at` the part of worker `lost` is left out."""
    inputs, targets = samples()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = data.GlobalBatches(SAMPLES, GLOBAL_BATCH, seed=1)
    curve = []
    for step in range(STEPS):
        chosen = batches.indices(step)
        if step == lost_at:
            chosen = np.delete(chosen, data.split(GLOBAL_BATCH, shares)[lost])
        loss = nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(float(loss.detach()) * len(chosen) / GLOBAL_BATCH)
    return np.array(curve)


@needs_mpirun
def test_ring_trains_like_one_worker(tmp_path):
    shares = (1.0, 2.0)
    found = run_ranks(tmp_path, 2, spec.Ring(backend="mpi"), shares=shares)
    curve = whole([found[rank]["losses"] for rank in range(2)])
    assert largest_difference(curve, curve_by_hand(list(shares))) < 1e-4


@needs_mpirun
def test_a_killed_rank_leaves_three_that_finish_with_the_right_sums(tmp_path):
    shares = (1.0, 1.0, 2.0, 1.0)
    ring = spec.Ring(backend="mpi", bucket="2KiB")
    found = run_ranks(tmp_path, 4, ring, "--with-ft", "ulfm", shares=shares, lose="2@20")
    assert sorted(found) == [0, 1, 3]
    assert {tuple(result["members"]) for result in found.values()} == {(0, 1, 3)}
    reference = curve_by_hand(list(shares), lost=2, lost_at=20)
    # What rank 2 saw before it died is not known to anybody; the sums that came of it are.
    curve = whole([result["losses"] for result in found.values()])
    assert largest_difference(curve[20:], reference[20:]) < 1e-4
    undisturbed = curve_by_hand(list(shares))
    assert largest_difference(curve[20:], undisturbed[20:]) > 1e-3


@needs_mpirun
def test_mpirun_paceline_train_prints_one_answer_that_agrees_with_single(tmp_path):
    def train(*flags: str) -> list[str]:
        return [
            *(sys.executable, "-m", "paceline", "train", "--model", "adult-dnn", "--json"),
            *("--data", "synthetic", "--global-batch", "16", "--steps", "8", *flags),
        ]

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    alone = subprocess.run(
        train("--architecture", "single"),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    average = train("--architecture", "average:every=1")
    answer = json.loads(run_mpirun(tmp_path, 4, (), average, environment))
    assert answer["workers"] == 4
    assert any("MPI" in note for note in answer["notes"])
    assert answer["loss"]["last"] == pytest.approx(json.loads(alone.stdout)["loss"]["last"], 1e-4)


def test_without_mpirun_it_says_how_to_start():
    with pytest.raises(MemberError, match="mpirun -n 2 paceline"):
        run_members(loss_curve, workers=2, architecture=spec.Ring(backend="mpi"))
