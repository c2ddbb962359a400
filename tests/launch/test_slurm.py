"""A batch script, and a real Slurm on this machine: its controller, one host, two tasks.

Needs Debian's packages slurmctld, slurmd, slurm-client and munge, and root; installs nothing.
"""

import contextlib
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.launch.slurm import BatchJob, batch_script

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo")
LAUNCHER = "import os; from paceline.launch import identify; print(identify(os.environ).launcher)"


def test_script_asks_for_a_task_per_member_and_quotes_the_command() -> None:
    job = BatchJob(
        command=("paceline", "train", "--data-dir", "my data"),
        workers=6,
        servers=2,
        hosts=4,
        cores=8,
        gpus=1,
        time="2:00:00",
    )
    lines = batch_script(job).splitlines()
    assert lines[0] == "#!/bin/bash"
    for asked in ("nodes=4", "ntasks=8", "cpus-per-task=8", "gpus-per-task=1", "time=2:00:00"):
        assert f"#SBATCH --{asked}" in lines
    assert not any("partition" in line for line in lines)
    assert "PACELINE_SERVERS=2" in "\n".join(lines)
    assert lines[-1].endswith("paceline train --data-dir 'my data'")


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(SpecError, match="no command"):
        batch_script(BatchJob(command=(), workers=1))
    with pytest.raises(SpecError, match="2 workers and 0 servers on 3 hosts"):
        batch_script(BatchJob(command=("true",), workers=2, hosts=3))


def test_tasks_of_a_real_slurm_meet_and_examine_each_other(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "paceline", "doctor", "--json", "--shared-memory=1MiB")
    job = BatchJob(command=command, workers=1, servers=1, name="doctor")
    script = tmp_path / "job.sh"
    # The first line of output comes from sbatch's own shell, where Slurm's variables mean nothing.
    shell = f"{sys.executable} -c '{LAUNCHER}'\nsrun"
    script.write_text(batch_script(job).replace("srun", shell, 1))
    with slurm(tmp_path) as environment:
        submit = ["sbatch", "--wait", "--parsable", f"--chdir={tmp_path}", str(script)]
        done = subprocess.run(
            submit, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        output = "".join(path.read_text() for path in tmp_path.glob("doctor-*.out"))
    assert done.returncode == 0, done.stderr + output
    shell_line, _, printed = output.partition("\n")
    assert shell_line == "none"
    answer = json.loads(printed)
    assert [member["member"] for member in answer["members"]] == ["worker0", "server0"]
    assert {member["local_members"] for member in answer["members"]} == {2}
    assert [pair["problem"] for pair in answer["pairs"]] == ["", ""]


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A Slurm of our own on free ports; yields the environment its commands need."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Slurm; missing: {', '.join(missing) or 'root'}")
    socket_path = f"/tmp/paceline-test-munge-{os.getpid()}/socket"  # a socket's path must be short
    Path(socket_path).parent.mkdir(mode=0o700)
    environment = {**os.environ, "PATH": search_path(), "SLURM_CONF": str(folder / "slurm.conf")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    write_configuration(folder, socket_path)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, Path(socket_path).parent)
        files = {"key-file": "munge.key", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={folder / file}" for name, file in files.items()]
        options += [f"--seed-file={folder / 'munged.seed'}", f"--socket={socket_path}"]
        daemons = {
            "munged": ["munged", "--foreground", "--force", *options],
            "slurmctld": ["slurmctld", "-D"],
            "slurmd": ["slurmd", "-D"],
        }
        for name, argv in daemons.items():
            log = stack.enter_context((folder / f"{name}.out").open("w"))
            process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
            stack.callback(end, process)
        wait_until_idle(folder, environment)
        yield environment


def write_configuration(folder: Path, socket_path: str) -> None:
    host = platform.node()
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(64))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(
        f"""
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket_path}
CredType=cred/munge
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={len(os.sched_getaffinity(0))} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES OverSubscribe=FORCE:4 State=UP
"""
    )


def wait_until_idle(folder: Path, environment: dict[str, str]) -> None:
    deadline, state = time.monotonic() + 40, ""
    while time.monotonic() < deadline:
        listed = ["sinfo", "--noheader", "--format=%T"]
        asked = subprocess.run(
            listed, env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        state = asked.stdout.strip()
        if state == "idle":
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-500:] for path in folder.glob("*.out"))
    pytest.fail(f'Slurm\'s host is "{state}" and not idle:\n{logs}')


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def search_path() -> str:
    return os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"


def free_port() -> int:
    """Below those that the kernel gives to outgoing connections, one of which could take it."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
