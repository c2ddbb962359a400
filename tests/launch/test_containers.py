"""Members inside containers: every engine's command line, and a real podman where there is one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import MemberError, MissingError, SpecError
from paceline.launch import (
    Identity,
    MemberCommand,
    check_container,
    identify,
    inside,
    parse_container,
    supervise,
    to_environment,
)
from paceline.launch.containers import wrap

SECRET = "0123456789abcdef"
IDENTITY = Identity(index=0, workers=2, key=SECRET, coordinator_descriptor=7)
COMMAND = MemberCommand(
    name="worker0",
    argv=(sys.executable, "-m", "paceline.builtin.member"),
    environment={**to_environment(IDENTITY), "OMP_NUM_THREADS": "1", "LESS": "no"},
    cores=(0, 1),
    descriptors=(7,),
)


@pytest.mark.parametrize("text", ["docker:example.org/p:1", "podman:p", "apptainer:p.sif"])
def test_every_engine_passes_the_member_on(text: str, tmp_path: Path) -> None:
    wrapped = wrap(COMMAND, parse_container(text), "job-worker0", [tmp_path])
    engine, _, image = text.partition(":")
    place = wrapped.argv.index(image)
    assert wrapped.argv[0] == engine
    assert wrapped.argv[-3:] == ("python3", "-m", "paceline.builtin.member")
    dies_with_us = f"paceline.launch.lifeline {os.getpid()}" in " ".join(wrapped.argv[place:])
    assert dies_with_us == (engine != "apptainer")
    assert any(str(tmp_path) in option for option in wrapped.argv[:place])
    assert any(str(Path.cwd()) in option for option in wrapped.argv[:place])
    assert SECRET not in " ".join(wrapped.argv)
    inner = identify(wrapped.environment)
    assert (inner.key, inner.coordinator_descriptor) == (SECRET, -1)
    assert wrapped.descriptors == ()


@pytest.mark.parametrize("text", ["docker:p", "podman:p"])
def test_a_container_keeps_the_hosts_network_shared_memory_and_cores(text: str) -> None:
    options = wrap(COMMAND, parse_container(text), "job-worker0", []).argv
    for option in ("--network=host", "--ipc=host", "--pid=host", "--rm", "--cpuset-cpus=0,1"):
        assert option in options
    assert "--name=job-worker0" in options
    assert {"--env=PACELINE_MEMBER", "--env=OMP_NUM_THREADS"} <= set(options)
    assert "--env=LESS" not in options


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dokcer:p", 'did you mean "docker"'),
        ("podman", "names no image"),
        ("docker:rootfs=/srv", "podman:rootfs=FOLDER"),
        ("podman:rootfs=/nowhere/at/all", "debootstrap"),
    ],
)
def test_bad_input_is_refused(text: str, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        parse_container(text)


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingError, match="apptainer is not installed here"):
        check_container("apptainer:p.sif")
    check_container("")


def test_docker_without_its_daemon_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2\nexit 1\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(MissingError, match="does not answer: Cannot connect"):
        check_container("docker:paceline")


def test_no_container_leaves_commands_alone() -> None:
    with inside("", [COMMAND], []) as commands:
        assert commands == [COMMAND]


SAY = """
import json, os, pathlib
from paceline.launch import identify
pathlib.Path("{folder}/mark").write_text("written inside")
print(json.dumps([identify(os.environ).name, sorted(os.sched_getaffinity(0)), os.getcwd(),
                  os.stat("/dev/shm").st_dev, pathlib.Path("/run/.containerenv").exists()]))
"""


@pytest.fixture
def podman() -> str:
    """A container that sees this machine's own files."""
    missing = [name for name in ("podman", "runc", "unshare") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and podman; missing: {', '.join(missing) or 'root'}")
    line = ["unshare", "--mount", "mount", "--bind", "/", "/mnt"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    if Path(sys.executable).stat().st_dev != Path("/").stat().st_dev:
        pytest.skip("this interpreter is not on the root file system")
    return "podman:rootfs=/"


def member(name: str, script: str, cores: tuple[int, ...] = ()) -> MemberCommand:
    index = int(name.removeprefix("worker"))
    environment = {
        **os.environ,
        **to_environment(Identity(index=index, workers=2)),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    argv = (sys.executable, "-c", script)
    return MemberCommand(name=name, argv=argv, environment=environment, cores=cores)


def test_podman_runs_a_member_as_if_outside(podman: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    core = min(os.sched_getaffinity(0))
    said: list[bytes] = []
    command = member("worker1", SAY.format(folder=folder), cores=(core,))
    with inside(podman, [command], [folder]) as started:
        supervise(started, output=lambda *what: said.append(what[2]), deadline_seconds=60)
    shared_memory = os.stat("/dev/shm").st_dev
    assert json.loads(b"".join(said)) == ["worker1", [core], os.getcwd(), shared_memory, True]
    assert (folder / "mark").read_text() == "written inside"
    assert containers() == ""


def test_podman_ends_all_when_one_fails(podman: str) -> None:
    commands = [
        member("worker0", "import time; time.sleep(300)"),
        member("worker1", "import time; time.sleep(1); raise SystemExit('gone wrong')"),
    ]
    with (
        pytest.raises(MemberError, match="gone wrong"),
        inside(podman, commands, []) as started,
    ):
        supervise(started, output=lambda *what: None, deadline_seconds=60)
    assert containers() == ""


def test_only_root_sees_its_own_files_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingError, match="run as root"):
        check_container("podman:rootfs=/")


def containers() -> str:
    """What this process has left in podman's list."""
    line = [
        "podman",
        "ps",
        "--all",
        "--format={{.Names}}",
        f"--filter=name=paceline-{os.getpid()}-",
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=30, check=True).stdout
