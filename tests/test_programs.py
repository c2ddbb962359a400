"""Tests and package call only programs that something provides: a fresh machine must not fail."""

import re
from pathlib import Path

import pytest

from tests.support.programs import UNKNOWN, calls, programs

ROOT = Path(__file__).resolve().parents[1]

BASE = "part of Debian's base, of Python, git or make"
PROVIDED = {
    "python": BASE,
    "sh": BASE,
    "sleep": BASE,
    "true": BASE,
    "mount": BASE,
    "umount": BASE,
    "setpriv": BASE,
    "unshare": BASE,
    "ip": "package iproute2",
    "tc": "package iproute2",
    "nft": "package nftables",
    "chromium": "package chromium",
    "chromedriver": "package chromium-driver",
    "podman": "package podman",
    "runc": "package runc",
    "munged": "package munge",
    "slurmctld": "package slurmctld",
    "slurmd": "package slurmd",
    "sbatch": "package slurm-client",
    "sinfo": "package slurm-client",
    "srun": "package slurm-client",
    "mpirun": "extra mpi",
    "docker": "asked for first; a sentence says that it is missing, and no test starts it",
    "horovodrun": "asked for first; a sentence says that it is missing, and no test starts it",
}
"""Program -> who provides it. Tests skip, with the reason, where a package is not installed."""

GIVEN = {
    "benchmarks/exchange.py": "what `member` and `shutil.which` returned: python or mpirun",
    "benchmarks/recovery_peers.py": "the interpreter that the user named for a peer",
    "paceline/bench/peers/__init__.py": "the interpreter that the user named for a peer",
    "paceline/cli/flags.py": "the interpreter that the user named for a peer",
    "paceline/cli/observe.py": "this interpreter",
    "paceline/launch/containers.py": "the engine that the user named: docker, podman, apptainer",
    "paceline/launch/lifeline.py": "the command line it is called with",
    "paceline/launch/process.py": "the member's command line",
    "paceline/launch/ray.py": "the member's command line",
    "paceline/tunnel/agents.py": "command lines of the tunnel's own Python programs",
    "tests/architectures/test_mpi.py": "mpirun beside this interpreter",
    "tests/docs/test_wheel.py": "the interpreter of the environment it made, and this one",
    "tests/diagnose/conftest.py": "words before python: `unshare --mount sh`",
    "tests/launch/test_launchers.py": "LAUNCHERS: python or mpirun",
}
"""Files with command lines that come from elsewhere, and from where."""


def sources() -> dict[str, Path]:
    """Every file but this one, which holds examples."""
    parts = ("paceline", "tests", "benchmarks", "examples")
    found = sorted(path for part in parts for path in (ROOT / part).rglob("*.py"))
    return {str(p.relative_to(ROOT)): p for p in found if p != Path(__file__).resolve()}


def test_every_program_is_provided():
    for name, path in sources().items():
        called = programs(path)
        assert (UNKNOWN in called) == (name in GIVEN), f"{name} calls {sorted(called)}"
        missing = called - {UNKNOWN} - set(PROVIDED)
        assert not missing, f"{name} calls {sorted(missing)}, which nothing installs"


def test_the_packages_are_installed_where_it_says():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    listed = re.search(r"wanted=\(([^)]*)\)", script)
    assert listed is not None
    packages = {by.removeprefix("package ") for by in PROVIDED.values() if by.startswith("package")}
    assert packages <= set(listed[1].split())
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = {by.removeprefix("extra ") for by in PROVIDED.values() if by.startswith("extra")}
    assert extras <= set(re.findall(r"-e \.\[([^\]]*)\]", makefile)[0].split(","))


def test_no_entry_is_left_over():
    called = set().union(*(programs(path) for path in sources().values()))
    assert set(PROVIDED) <= called, f"nobody calls {set(PROVIDED) - called}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("ping = ['ping', '-c1']\nsubprocess.run(network.command('a', ping))", {"ip", "ping"}),
        ("subprocess.run(['ip', 'netns', 'exec', name, 'ping'])", {"ip", "ping"}),
        ("def go(*line):\n  subprocess.run(line)\ngo('ping', '-c1')", {"ping"}),
        ("def line():\n  return ['ping']\nsubprocess.Popen(line())", {"ping"}),
        ("program = shutil.which('ping') or '/usr/bin/fping'", {"ping"}),
        ("program = shutil.which('ping') or 'fping'\nos.execv(program, [])", {"ping", "fping"}),
        ("for name in ('ping', 'fping'): shutil.which(name)", {"ping", "fping"}),
        ("CODE = '''import subprocess\nsubprocess.run([\"ping\"])'''", {"ping"}),
        ("MemberCommand(name='a', argv=('ping', '-c1'))", {"ping"}),
        ("subprocess.run(what.ever())", {UNKNOWN}),
        ("subprocess.run([sys.executable, 'ping'])", {"python"}),
    ],
)
def test_a_program_is_found(source, found):
    assert calls(source) == found
