"""Members started by hand, without a launcher to notice: whoever dies is named at once.

The wait for anybody is 120 s, and these tests give up before it.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

from paceline import spec
from paceline.record import RunFolder

PROGRAM = Path(__file__).with_name("takes_steps.py")
SECONDS = 80.0


def be_member(environment, arguments, output):
    """Run the program as a process of its own would."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv, status = [str(PROGRAM), *arguments], 0
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    except SystemExit as ending:  # a server that is done
        status = ending.code or 0
    except BaseException as error:
        traceback.print_exc()
        sys.last_value, status = error, 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Job:
    """Processes that know each other by torch's four variables only."""

    def __init__(self, tmp_path, architecture, workers, servers, steps=80):
        options = spec.parse_architecture(architecture)
        cluster = spec.Cluster(workers=workers, servers=servers)
        experiment = spec.Experiment(architecture=options, cluster=cluster)
        self.folder = RunFolder.create(tmp_path / "run", experiment)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        told = {
            "WORLD_SIZE": str(workers + servers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PACELINE_SERVERS": str(servers),
            "PACELINE_ARCHITECTURE": architecture,
            "PACELINE_RUN": str(self.folder.path),
            "PACELINE_KEY": "a key of this test",
        }
        names = [f"worker{rank}" for rank in range(workers)]
        names += [f"server{rank}" for rank in range(servers)]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paceline.testing", "torch._dynamo"])
        self.outputs = {name: tmp_path / f"{name}.txt" for name in names}
        self.members = {
            name: context.Process(
                target=be_member,
                args=({**told, "RANK": str(index)}, (str(steps), "0.02"), self.outputs[name]),
            )
            for index, name in enumerate(names)
        }

    def __enter__(self):
        for member in self.members.values():
            member.start()
        return self

    def __exit__(self, *_):
        for member in self.members.values():
            member.kill()
            member.join()

    def said(self, name):
        return self.outputs[name].read_text() if self.outputs[name].exists() else ""

    def kill(self, name, steps=6):
        """When some worker has taken so many steps: itself, where it is one."""
        watched = name if name.startswith("worker") else "worker0"
        end = time.monotonic() + SECONDS
        while self.said(watched).count("step ") < steps:
            assert time.monotonic() < end, self.said(watched)
            assert self.members[watched].is_alive(), self.said(watched)
            time.sleep(0.01)
        self.members[name].kill()
        self.members[name].join()
        assert self.members[name].exitcode == -signal.SIGKILL

    def endings(self, but):
        """Exit status and words of the others."""
        for member in self.members.values():
            member.join(SECONDS)
        names = [name for name in self.members if name != but]
        return {name: (self.members[name].exitcode, self.said(name)) for name in names}


@pytest.mark.parametrize(
    ("architecture", "servers"),
    [
        pytest.param("server:mode=sync", 2, marks=pytest.mark.slow),
        ("server:mode=sync,transport=tcp", 1),
        ("server:mode=bounded,placement=colocated,transport=tcp", 0),
    ],
)
def test_where_all_are_waited_for_everybody_names_the_lost_worker(tmp_path, architecture, servers):
    with Job(tmp_path, architecture, workers=3, servers=servers) as job:
        job.kill("worker1")
        for name, (status, said) in job.endings(but="worker1").items():
            assert status == 1, f"{name} went on"
            assert "worker1 was lost in step " in said, f"{name}: {said}"
            assert "no answer within" not in said


@pytest.mark.parametrize(
    "architecture",
    [
        "server:mode=async,transport=tcp",
        pytest.param("server:mode=async", marks=pytest.mark.slow),
        pytest.param("server:mode=quorum,quorum=2", marks=pytest.mark.slow),
    ],
)
def test_where_nobody_is_waited_for_the_others_go_on_and_the_record_says_so(tmp_path, architecture):
    with Job(tmp_path, architecture, workers=3, servers=1) as job:
        job.kill("worker1")
        for name, (status, said) in job.endings(but="worker1").items():
            assert status == 0, f"{name}: {said}"
        lost = [event for event in job.folder.events() if event.kind == "lost"]
        assert [event.text.partition(" in ")[0] for event in lost] == ["worker1 was lost"]
        states = {member.name: member.status for member in job.folder.members()}
        assert states == {
            "worker0": "finished",
            "worker1": "lost",
            "worker2": "finished",
            "server0": "finished",
        }


def test_a_lost_server_is_named_by_every_worker(tmp_path):
    with Job(tmp_path, "server:mode=async,transport=tcp", workers=2, servers=2) as job:
        job.kill("server1")
        ended = job.endings(but="server1")
        for name in ("worker0", "worker1"):
            status, said = ended[name]
            assert status == 1
            assert "server1 was lost in step " in said, said
