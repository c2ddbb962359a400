"""Members as processes of this machine: their output, their end, and what is left (nothing)."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.errors import DeadlineError, MemberError
from paceline.launch import MemberCommand, local, reserve, share_cores, supervise


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


def run(
    *commands: MemberCommand, deadline_seconds: float = 30.0, logs: Path | None = None
) -> dict[tuple[str, str], bytes]:
    """What each member printed, by name and stream."""
    said: dict[tuple[str, str], bytes] = {}

    def output(member: str, stream: str, content: bytes) -> None:
        said[member, stream] = said.get((member, stream), b"") + content

    supervise(commands, output=output, deadline_seconds=deadline_seconds, logs=logs)
    return said


def silent(member: str, stream: str, content: bytes) -> None:
    pass


def test_what_members_print_comes_whole_and_by_stream(tmp_path: Path) -> None:
    said = run(
        member("worker0", "printf 'one\\tten %%\\rdone\\n\\377'; echo two >&2; printf last"),
        member("worker1", "echo three >&2; head -c 300000 /dev/zero"),
        logs=tmp_path / "logs",
    )
    assert said["worker0", "stdout"] == b"one\tten %\rdone\n\xfflast"
    assert said["worker0", "stderr"] == b"two\n"
    assert said["worker1", "stdout"] == bytes(300_000)
    assert said["worker1", "stderr"] == b"three\n"
    logged = (tmp_path / "logs" / "worker0.log").read_bytes()
    assert sorted(logged) == sorted(said["worker0", "stdout"] + said["worker0", "stderr"])
    assert (tmp_path / "logs" / "worker1.log").stat().st_size == 300_006


def test_the_log_has_both_streams_in_order(tmp_path: Path) -> None:
    """Each line is printed once the one before it is there: two pipes have no common order."""
    seen = f"until grep -q $1 {tmp_path}/worker0.log; do sleep 0.02; done"
    lines = "".join(f"echo out{i}; seen out{i}; echo err{i} >&2; seen err{i}; " for i in (1, 2, 3))
    run(member("worker0", f"seen() {{ {seen}; }}; {lines}"), logs=tmp_path)
    expected = "".join(f"out{i}\nerr{i}\n" for i in (1, 2, 3))
    assert (tmp_path / "worker0.log").read_text() == expected


def test_lines_are_passed_on_whole_and_what_has_no_end_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[bytes] = []
    heard = tmp_path / "heard"

    def output(member: str, stream: str, part: bytes) -> None:
        parts.append(part)
        if part == b"how":
            heard.touch()

    pause = f"until [ -e {heard} ]; do sleep 0.02; done"
    script = f"printf 'how'; {pause}; echo ever"
    supervise([member("worker0", script)], output=output, deadline_seconds=60)
    assert parts == [b"how", b"ever\n"]
    parts.clear()
    monkeypatch.setattr("paceline.launch.process.PART_SECONDS", 60.0)
    script = "printf a; sleep 0.2; printf b; echo c; printf d"
    supervise([member("worker0", script)], output=output, deadline_seconds=60)
    assert parts == [b"abc\n", b"d"]


def test_the_first_failure_ends_the_others_and_carries_its_last_words() -> None:
    pids: dict[str, int] = {}
    with pytest.raises(MemberError, match="worker1 exited 3; its last words:\n  oh no"):
        supervise(
            [member("worker0", "sleep 300 & wait"), member("worker1", "echo oh no; exit 3")],
            output=silent,
            started=pids.__setitem__,
        )
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_the_one_that_was_killed_is_blamed_and_not_the_one_that_lost_it() -> None:
    with pytest.raises(MemberError) as caught:
        run(
            member("worker0", "sleep 0.3; echo Connection closed by peer >&2; exit 1"),
            member("worker1", "sleep 0.25; kill -9 $$"),
        )
    assert (caught.value.member, caught.value.member_status) == ("worker1", -signal.SIGKILL)
    assert caught.value.exit_status == 128 + signal.SIGKILL


def test_a_refusal_is_the_message_though_its_echo_dies_first() -> None:
    refuses = "echo 'error: ring: no such thing.' >&2; echo '  fix: leave it out.' >&2; "
    echo = "echo 'Traceback (most recent call last):' >&2; echo 'X: Connection reset by peer' >&2; "
    with pytest.raises(MemberError) as caught:
        run(
            member("worker0", f"sleep 0.2; {refuses} sleep 1; exit 2"),  # slow to leave
            member("worker1", f"sleep 0.4; {echo} exit 1"),
            member("worker2", "sleep 300"),
        )
    assert str(caught.value) == "worker0: ring: no such thing.\n  fix: leave it out."
    assert caught.value.exit_status == 2


def test_a_member_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.process.GRACE_SECONDS", 0.5)
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
        "supervise([command], output=lambda *said: None)\n"
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
    assert said["worker0", "stdout"].split()[-1] == str(core).encode()
    assert (tmp_path / "file").read_text() == "through\n"


def test_cores_are_shared_equally_or_not_at_all() -> None:
    have = sorted(os.sched_getaffinity(0))
    assert share_cores(1) == [()]
    assert share_cores(len(have) + 1) == [()] * (len(have) + 1)
    each = share_cores(len(have))
    if len(have) > 1:
        assert sorted(core for cores in each for core in cores) == have


def test_a_reserved_port_is_nobody_elses_until_it_is_named() -> None:
    with reserve("127.0.0.1") as reserved:
        address = reserved.getsockname()
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(100)]
        assert address not in [other.getsockname() for other in others]
        for other in others:
            other.close()
        with socket.create_server(address) as listener:  # reuses, as torch's store does
            assert listener.getsockname() == address


def test_one_that_fails_between_two_looks_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output ends before it does: all may be done by the time that is asked, and it was alive
    when failures were looked for."""
    look, looks = local._Members.raise_first_cause, list[str]()

    def look_before_the_end(members: local._Members) -> None:
        if members.done and not looks:
            looks.append("too early")
        else:
            look(members)

    monkeypatch.setattr(local._Members, "raise_first_cause", look_before_the_end)
    with pytest.raises(MemberError, match="worker0 exited 7"):
        run(member("worker0", "exit 7"))
    assert looks == ["too early"]
