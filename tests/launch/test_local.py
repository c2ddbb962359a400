"""Members as processes of this machine: their output, their end, and what is left (nothing)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.errors import DeadlineError, MemberError
from paceline.launch import MemberCommand, share_cores, supervise
from paceline.launch.local import blame


def member(
    name: str, script: str, cores: tuple[int, ...] = (), descriptors: tuple[int, ...] = ()
) -> MemberCommand:
    return MemberCommand(
        name=name,
        argv=("sh", "-c", script),
        environment=dict(os.environ),
        cores=cores,
        descriptors=descriptors,
    )


def run(*commands: MemberCommand, deadline_seconds: float = 30.0) -> list[tuple[str, str]]:
    said: list[tuple[str, str]] = []
    supervise(
        commands,
        output=lambda name, line: said.append((name, line)),
        deadline_seconds=deadline_seconds,
    )
    return said


def test_lines_come_with_their_members_name_and_the_last_needs_no_newline() -> None:
    said = run(
        member("worker0", "echo one; printf 'ten %%\\rdone\\n'; printf last"),
        member("worker1", "echo two >&2"),
    )
    assert [line for name, line in said if name == "worker0"] == ["one", "done", "last"]
    assert ("worker1", "two") in said


def test_the_first_failure_ends_the_others_and_carries_its_last_words() -> None:
    pids: dict[str, int] = {}
    with pytest.raises(MemberError, match="worker1 exited 3; its last words:\n  oh no"):
        supervise(
            [member("worker0", "sleep 300 & wait"), member("worker1", "echo oh no; exit 3")],
            output=lambda name, line: None,
            started=pids.__setitem__,
        )
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_the_one_that_was_killed_is_blamed_and_not_the_one_that_lost_it() -> None:
    with pytest.raises(MemberError) as caught:
        run(
            member("worker0", "sleep 0.3; echo Connection closed by peer; exit 1"),
            member("worker1", "sleep 0.25; kill -9 $$"),
        )
    assert (caught.value.member, caught.value.member_status) == ("worker1", -signal.SIGKILL)
    assert blame(-9, []) < blame(1, ["any error"]) < blame(1, ["Connection reset by peer"])


def test_a_member_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.local.GRACE_SECONDS", 0.5)
    with pytest.raises(DeadlineError, match="missing: worker0"):
        run(member("worker0", "trap '' TERM; while :; do sleep 0.1; done"), deadline_seconds=0.5)


def test_a_process_left_behind_neither_holds_up_nor_survives(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    run(member("worker0", f"sleep 300 & echo $! > {file}"))
    left = int(file.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(left)


def test_members_die_with_a_killed_launcher(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = (
        "import os\n"
        "from paceline.launch import MemberCommand, supervise\n"
        f"line = ('sh', '-c', 'echo $$ > {file}; exec sleep 300')\n"
        "command = MemberCommand(name='worker0', argv=line, environment=dict(os.environ))\n"
        "supervise([command], output=print)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 30
        while not (file.exists() and file.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.05)
        pid = int(file.read_text())
    finally:
        launcher.kill()
        launcher.wait(10)
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_cores_and_open_files_are_passed_on(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with (tmp_path / "file").open("w") as file:
        number = file.fileno()
        script = f"echo through > /proc/self/fd/{number}; grep Cpus_allowed_list /proc/self/status"
        said = run(member("worker0", script, cores=(core,), descriptors=(number,)))
    assert said[-1][1].split()[-1] == str(core)
    assert (tmp_path / "file").read_text() == "through\n"


def test_cores_are_shared_equally_or_not_at_all() -> None:
    have = sorted(os.sched_getaffinity(0))
    assert share_cores(1) == [()]
    assert share_cores(len(have) + 1) == [()] * (len(have) + 1)
    each = share_cores(len(have))
    if len(have) > 1:
        assert sorted(core for cores in each for core in cores) == have
