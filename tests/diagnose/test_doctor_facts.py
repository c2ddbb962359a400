"""Facts of this machine, and the two causes that lie in the machine itself: rights and memory."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.diagnose.doctor import Examination, Requirements, findings, gather
from paceline.launch import Identity


def test_facts_are_this_machines() -> None:
    facts = gather(Identity(), {"OMP_NUM_THREADS": "3"})
    assert (facts.member, facts.address, facts.interface) == ("worker0", "127.0.0.1", "lo")
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.threads == 3
    assert {"python", "torch", "paceline"} <= set(facts.versions)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory, of the size that containers have by default."""
    folder = tmp_path / "shm"
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(line, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root, to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_shared_memory_that_is_too_small_is_named(small_memory: Path) -> None:
    two_on_one_host = Identity(workers=2, local_members=2)
    facts = gather(two_on_one_host, {"OMP_NUM_THREADS": "1"}, shared_memory=small_memory)
    found = findings(Examination(facts=[facts]), Requirements(shared_memory_bytes=2**28))
    (finding,) = [f for f in found if f.kind == "shared-memory"]
    assert finding.severity == "error"
    assert "has 67.1 MB, and the job needs 268 MB" in finding.problem
    enough = findings(Examination(facts=[facts]), Requirements(shared_memory_bytes=2**20))
    assert [f for f in enough if f.kind == "shared-memory"] == []


def test_missing_rights_are_named() -> None:
    if shutil.which("setpriv") is None or os.geteuid() != 0:
        pytest.skip("needs root and setpriv, to give rights up")
    without = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"]
    line = [*without, sys.executable, "-m", "paceline", "doctor", "--on", "tunnel", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    (finding,) = [f for f in json.loads(done.stdout)["findings"] if f["kind"] == "tunnel-rights"]
    assert finding["severity"] == "error"
    assert "CAP_NET_ADMIN missing" in finding["problem"]
    assert "root" in finding["fix"]


def test_threads_as_members_of_this_host() -> None:
    line = [sys.executable, "-m", "paceline", "doctor", "-n", "2", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    answer = json.loads(done.stdout)
    assert (done.returncode == 0) == answer["healthy"]
    assert [member["member"] for member in answer["members"]] == ["worker0", "worker1"]
    assert len(answer["pairs"]) == 2


def test_bad_input_is_refused() -> None:
    line = [sys.executable, "-m", "paceline", "doctor", "--hosts", "a,a"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "two or more different hosts" in done.stderr
