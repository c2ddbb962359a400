"""Keras on its torch backend is a PyTorch model: the example runs by the PyTorch path."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "keras_on_torch.py"


@pytest.mark.slow
def test_the_example_trains_on_two_workers(in_empty_folder):
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--architecture", "ring"]
    done = subprocess.run(
        [*command, "--json", str(EXAMPLE)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workers"] == 2
    assert "step 100 loss" in done.stderr
