"""Members started by hand, without a launcher to notice: whoever dies is named at once.

The wait for anybody is 120 s, and these tests give up before it.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import spec
from paceline.record import RunFolder

PROGRAM = Path(__file__).with_name("takes_steps.py")
SECONDS = 60.0


class Job:
    """Processes that know each other by torch's four variables only."""

    def __init__(self, tmp_path, architecture, workers, servers, steps=60):
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
            "OMP_NUM_THREADS": "1",
        }
        names = [f"worker{rank}" for rank in range(workers)]
        names += [f"server{rank}" for rank in range(servers)]
        self.members = {
            name: subprocess.Popen(
                [sys.executable, PROGRAM, str(steps), "0.02"],
                env={**os.environ, **told, "RANK": str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index, name in enumerate(names)
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for member in self.members.values():
            member.kill()
            member.communicate()

    def kill(self, name, after=6):
        """When it has taken so many steps."""
        member = self.members[name]
        for _ in range(after):
            assert member.stdout.readline().startswith("step"), member.stderr.read()
        member.send_signal(signal.SIGKILL)
        assert member.wait(SECONDS) == -signal.SIGKILL

    def kill_server(self, name, after=6):
        for _ in range(after):
            assert self.members["worker0"].stdout.readline().startswith("step")
        self.members[name].kill()

    def endings(self, but):
        """Exit status and last words of the others."""
        ended = {}
        for name, member in self.members.items():
            if name != but:
                _, said = member.communicate(timeout=SECONDS)
                ended[name] = member.returncode, said
        return ended


@pytest.mark.parametrize(
    ("architecture", "servers"),
    [
        ("server:mode=sync", 2),
        ("server:mode=sync,transport=tcp", 1),
        ("server:mode=bounded,placement=colocated,transport=tcp", 0),
    ],
)
def test_where_all_are_waited_for_everybody_names_the_lost_worker(tmp_path, architecture, servers):
    with Job(tmp_path, architecture, workers=3, servers=servers) as job:
        job.kill("worker1")
        for name, (status, said) in job.endings(but="worker1").items():
            assert status != 0, f"{name} went on"
            assert "worker1 was lost in step " in said, f"{name}: {said}"
            assert "no answer within" not in said


@pytest.mark.parametrize(
    "architecture",
    ["server:mode=async", "server:mode=async,transport=tcp", "server:mode=quorum,quorum=2"],
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
        job.kill_server("server1")
        ended = job.endings(but="server1")
        for name in ("worker0", "worker1"):
            status, said = ended[name]
            assert status != 0
            assert "server1 was lost in step " in said, said
