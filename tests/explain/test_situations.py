"""The laboratory's files can be read, and every cause in them is one that `explain` knows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

from paceline.explain.findings import CauseName

ROOT = Path(__file__).parents[2]


def test_every_situation_is_an_experiment_with_a_cause():
    command = [sys.executable, "benchmarks/explain.py", "--list", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) >= 30
    assert {row["cause"] for row in rows} <= {*get_args(CauseName), ""}
    assert len({row["cause"] for row in rows}) >= 15
