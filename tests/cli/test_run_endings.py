"""How `paceline run` ends: Ctrl-C, kill, kill -9, a closed pipe, a full disk."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from paceline.record import RunFolder

DEADLINE_SECONDS = 60
SAVES = """
import os, time
try:
    print("ready", os.getpid(), flush=True)
    time.sleep(300)
except KeyboardInterrupt:
    time.sleep(0.3)
    open("saved" + os.environ["RANK"], "w").close()
    raise
"""
COUNTS = """
import time
for i in range(10**6):
    print(i, flush=True)
    time.sleep(0.001)
"""


@contextmanager
def launched(script: str, *flags: str, out: str = "run") -> Iterator[subprocess.Popen[str]]:
    Path("script.py").write_text(script, encoding="utf-8")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", "--out", out, *flags, "script.py"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs this in the background has Ctrl-C ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def pids(launcher: subprocess.Popen[str], workers: int) -> list[int]:
    """Wait until all workers have said that they are ready."""
    assert launcher.stdout is not None
    lines = [launcher.stdout.readline() for _ in range(workers)]
    assert all("ready" in line for line in lines), lines
    return [int(line.split()[-1]) for line in lines]


def gone(members: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in members) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(psutil.pid_exists(pid) for pid in members)


def test_ctrl_c_lets_scripts_save_and_says_what_was_kept(in_empty_folder):
    with launched(SAVES, "-n", "2", "--architecture", "ring") as launcher:
        members = pids(launcher, 2)
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 130
    assert Path("saved0").exists()
    assert Path("saved1").exists()
    assert err.rstrip().splitlines()[-1] == ("interrupted by Ctrl-C; what was recorded is in run.")
    summary = RunFolder(Path("run")).summary()
    assert (summary.status, summary.notes) == ("interrupted", ["interrupted by Ctrl-C"])
    assert gone(members)


def test_sigterm_reaches_scripts_as_itself(in_empty_folder):
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(open('asked', 'w').close()))\n" + SAVES
    )
    with launched(script) as launcher:
        pids(launcher, 1)
        launcher.terminate()
        _, err = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert Path("asked").exists()
    assert "ended by SIGTERM; what was recorded is in run." in err
    assert "Traceback" not in err
    assert RunFolder(Path("run")).summary().status == "interrupted"


def test_a_killed_launcher_leaves_a_run_that_does_not_run(in_empty_folder):
    with launched(SAVES) as launcher:
        members = pids(launcher, 1)
        assert RunFolder(Path("run")).summary().status == "running"
        launcher.kill()
        launcher.communicate(timeout=DEADLINE_SECONDS)
        assert RunFolder(Path("run")).summary().status == "killed"
    assert gone(members)


def test_a_closed_pipe_ends_the_job_in_silence(in_empty_folder):
    with launched(COUNTS) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        assert launcher.stdout.readline() == "0\n"
        launcher.stdout.close()  # as `head -1` does
        err = launcher.stderr.read()
        launcher.wait(DEADLINE_SECONDS)
    assert launcher.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    assert RunFolder(Path("run")).summary().status == "interrupted"


@pytest.fixture
def small_disk(in_empty_folder):
    """A disk of 300 KB."""
    folder = in_empty_folder / "disk"
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(line, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root, to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_sentence_and_a_failed_run(small_disk):
    chatty = "import time\nprint('x' * 400_000)\ntime.sleep(300)\n"
    path = small_disk / "run"
    with launched(chatty, out=str(path)) as launcher:
        _, err = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 1
    assert err.splitlines()[-2:] == [
        f"error: {path}/logs/worker0.log cannot be written: No space left on device.",
        "  fix: make room, or name a folder on another disk with --out.",
    ]
    assert "Traceback" not in err
    assert RunFolder(path).summary().status == "failed"
