"""Every benchmark is kept alive: it runs at its smallest setting, or at least imports and answers.

A figure on a page can be measured again only as long as the benchmark behind it works.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

SMALLEST = {
    "advise.py": ("--on", "predict", "--only", "resnet50-1gbit-2", "--json"),
    "exchange.py": ("--sizes", "1", "--workers", "2", "--rounds", "1", "--only", "gloo", "--json"),
    "explain.py": ("--list",),
    "gains.py": ("--json",),
    "ideal_links.py": ("--compute", "0.15", "--json"),
    "predict_speed.py": ("--json",),
}
"""Benchmarks that run within seconds at these settings."""

ANSWERING = {
    "endurance.py": "a job of many steps",
    "gpu.py": "needs a GPU",
    "observe.py": "compares jobs of several minutes",
    "observe_scoreboard.py": "plants 40 causes in real jobs",
    "predict.py": "each pair is a job in the tunnel",
    "recovery.py": "waits for several failures in a row",
    "sealed.py": "its cases are not part of the repository",
    "siege.py": "sends a hundred thousand messages",
    "soak.py": "lets members of many jobs fail",
    "telemetry.py": "alternates jobs for minutes",
    "training.py": "trains real networks next to other frameworks",
    "tunnel.py": "needs a tunnel, and 30 s of CPU for its shortest row",
}
"""Benchmarks that take longer: they import, and `--help` names their options."""

IMPORTED = {
    "besieged.py": "the jobs of siege.py",
    "gpu_script.py": "the script of gpu.py",
    "pages.py": "writes pages for the others",
    "recovery_peers.py": "the peers of recovery.py",
    "scoreboard.py": "the page of explain.py and gains.py",
    "strangers.py": "the attackers of siege.py",
    "tunnel_ddp.py": "the script of tunnel.py",
}
"""Parts of other benchmarks, and programs that take no options."""

HELP = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, f"{name}: {ended.code}"
"""
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    assert callable(getattr(importlib.import_module(name.removesuffix(".py")), "main", print))
"""


def python(*arguments):
    found = subprocess.run(
        [sys.executable, *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def test_every_benchmark_is_in_one_of_the_tables():
    listed = [*SMALLEST, *ANSWERING, *IMPORTED]
    assert sorted(listed) == sorted(path.name for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs_at_its_smallest_setting(name):
    answer = json.loads(python(name, *SMALLEST[name]))
    assert answer["rows"]
    assert isinstance(answer["checks"], list)


def test_the_longer_ones_answer():
    told = python("-c", HELP, *ANSWERING)
    assert told.count("usage: ") == len(ANSWERING)


def test_their_parts_can_be_imported():
    python("-c", IMPORT, *IMPORTED)
