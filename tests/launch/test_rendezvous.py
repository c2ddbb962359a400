"""mpirun names no coordinator: member 0 opens a port and tells the others."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.errors import DeadlineError, SpecError
from paceline.launch import Identity, meet, rendezvous

JOB = f"test-{os.getpid()}"


def member(index: int, members: int = 3, servers: int = 1) -> Identity:
    return Identity(
        index=index,
        workers=members - servers,
        servers=servers,
        local_index=index,
        local_members=members,
        launcher="mpirun",
    )


def test_all_learn_one_address_and_one_key() -> None:
    found: dict[int, Identity] = {}

    def come(index: int) -> None:
        found[index] = meet(member(index), {"PMIX_NAMESPACE": JOB}, deadline_seconds=20)

    threads = [threading.Thread(target=come, args=(index,)) for index in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(found) == [0, 1, 2]
    assert len({identity.coordinator for identity in found.values()}) == 1
    assert len({identity.key for identity in found.values()}) == 1
    assert len(found[0].key) >= 32
    with socket.socket(fileno=found[0].coordinator_descriptor) as listener:
        port = int(found[1].coordinator.rpartition(":")[2])
        assert listener.getsockname() == ("127.0.0.1", port)
    assert found[1].coordinator_descriptor == -1


def test_the_missing_are_named() -> None:
    with pytest.raises(DeadlineError, match="missing: server0, worker1"):
        meet(member(0), {"PMIX_NAMESPACE": f"{JOB}-empty"}, deadline_seconds=0.2)
    with pytest.raises(DeadlineError, match="missing: worker0"):
        meet(member(1), {"PMIX_NAMESPACE": f"{JOB}-empty"}, deadline_seconds=0.2)


def test_a_coordinator_that_is_known_is_kept() -> None:
    known = Identity(index=1, workers=2, coordinator="head:1234", key="k")
    assert meet(known, {}) is known
    alone = Identity()
    assert meet(alone, {}) is alone


@pytest.mark.parametrize(
    ("launcher", "fix"),
    [("torchrun", "export PACELINE_KEY=…"), ("hosts", "openssl rand"), ("srun", "paceline slurm")],
)
def test_several_hosts_without_a_key_do_not_start(launcher: str, fix: str) -> None:
    """Nothing that all hosts can reach is private: worker 0 cannot hand one on."""
    spread = Identity(index=0, workers=2, coordinator="head:1234", launcher=launcher)
    with pytest.raises(SpecError, match="no key was given") as error:
        meet(spread, {})
    assert fix in error.value.fix


def test_one_host_passes_a_key_on_without_being_asked() -> None:
    """As torchrun starts members: a coordinator that anybody may write to, and no key."""
    found: dict[int, Identity] = {}
    environ = {"TORCHELASTIC_RUN_ID": JOB}

    def come(index: int) -> None:
        started = Identity(
            index=index,
            workers=2,
            local_members=2,
            local_index=index,
            coordinator="127.0.0.1:29500",
            store_is_kept=True,
            launcher="torchrun",
        )
        found[index] = meet(started, environ, deadline_seconds=20)

    threads = [threading.Thread(target=come, args=(index,)) for index in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found[0].key == found[1].key != ""
    assert found[0].coordinator == found[1].coordinator != "127.0.0.1:29500"
    socket.socket(fileno=found[0].coordinator_descriptor).close()


def test_a_silent_visitor_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "VISIT_SECONDS", 0.2)
    job, found = f"{JOB}-silent", {}

    def come(index: int) -> None:
        found[index] = meet(member(index, 2, 0), {"PMIX_NAMESPACE": job}, deadline_seconds=20)

    threads = [threading.Thread(target=come, args=(index,)) for index in (0, 1)]
    threads[0].start()
    silent = socket.socket(socket.AF_UNIX)
    for _ in range(200):
        try:
            silent.connect(f"\0paceline-{job}")
            break
        except OSError:
            time.sleep(0.02)
    threads[1].start()
    for thread in threads:
        thread.join(timeout=30)
    silent.close()
    assert found[0].key == found[1].key
    socket.socket(fileno=found[0].coordinator_descriptor).close()


def test_several_hosts_without_mpi4py_is_an_error_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    spread = Identity(index=1, workers=2, launcher="mpirun")
    with pytest.raises(SpecError, match="PACELINE_COORDINATOR=HOST_OF_RANK_0:PORT"):
        meet(spread, {})


TELL = """
import os, msgspec
from paceline.launch import identify, meet
alone_here = msgspec.structs.replace(identify(os.environ), local_members=1)
identity = meet(alone_here, os.environ)
print(identity.coordinator, identity.key)
"""


def test_between_hosts_mpi_carries_the_news() -> None:
    pytest.importorskip("mpi4py", reason="needs the extra paceline[mpi]")
    program = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "3"]
    line = [program, *options, sys.executable, "-c", TELL]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("\n")[:-1]
    assert len(said) == 3
    assert len(set(said)) == 1
    assert len(said[0].split()[1]) == 64
