"""A command on a lifeline ends with the process it hangs on, and passes its own end on."""

import os
import signal
import subprocess
import sys
import time

import psutil

LIFELINE = [sys.executable, "-m", "paceline.launch.lifeline"]


def test_exit_statuses_are_passed_on() -> None:
    line = [*LIFELINE, str(os.getpid()), "sh", "-c", "exit 7"]
    assert subprocess.run(line, timeout=30, check=False).returncode == 7
    line = [*LIFELINE, str(os.getpid()), "sh", "-c", "kill -9 $$"]
    assert subprocess.run(line, timeout=30, check=False).returncode == 128 + signal.SIGKILL


def test_the_command_dies_with_the_launcher() -> None:
    launcher = subprocess.Popen(["sleep", "300"])
    line = [*LIFELINE, str(launcher.pid), "sleep", "301"]
    hanging = subprocess.Popen(line)
    try:
        (child,) = wait_for_children(hanging.pid)
        launcher.kill()
        launcher.wait(10)
        assert hanging.wait(20) == 1
        psutil.wait_procs([child], timeout=10)
        assert not child.is_running()
    finally:
        for process in (launcher, hanging):
            process.kill()
            process.wait(10)


def test_a_launcher_that_is_gone_starts_nothing() -> None:
    launcher = subprocess.Popen(["true"])
    launcher.wait(10)
    line = [*LIFELINE, str(launcher.pid), "touch", "/nowhere/at/all"]
    done = subprocess.run(line, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


def wait_for_children(pid: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children()
        if children:
            return list(children)
        time.sleep(0.05)
    raise AssertionError("no child was started")
