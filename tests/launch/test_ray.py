"""A real Ray cluster of two nodes on this machine, and members placed on it."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import Interrupted, MemberError, MissingError
from paceline.launch import MemberCommand, identify, to_environment
from paceline.launch import ray as launcher


def command(identity: launcher.Identity, script: str) -> MemberCommand:
    return MemberCommand(
        name=identity.name,
        argv=(sys.executable, "-c", script),
        environment={**to_environment(identity), "SHELL_COLOUR": "of the driver alone"},
    )


def test_members_land_on_both_nodes_and_know_who_they_are(ray_cluster: str, tmp_path: Path) -> None:
    (tmp_path / "members").mkdir()
    said: dict[str, bytes] = {}
    script = (
        "import os, socket\n"
        "from paceline.launch import identify\n"
        "i = identify(os.environ)\n"
        "print('SHELL_COLOUR' in os.environ, os.environ['PACELINE_MEMBER'])\n"
        "if i.index == 0:\n"
        "    s = socket.socket(fileno=i.coordinator_descriptor)\n"
        "    print('%s:%d' % s.getsockname() == i.coordinator)\n"
    )
    with launcher.placed(2) as placed:
        assert placed.cores == 1  # so that one node cannot hold both
        identities = placed.identities(workers=1, run=tmp_path)
        commands = [command(identity, script) for identity in identities]

        def output(member: str, stream: str, content: bytes) -> None:
            said[member] = said.get(member, b"") + content

        placed.supervise(commands, tmp_path, output=output)
    assert said["worker0"].splitlines()[1] == b"True"
    assert (tmp_path / "logs" / "worker0.log").read_bytes() == said["worker0"]
    seen, member = said["server0"].decode().strip().split(" ", 1)
    assert seen == "False"
    server = identify({"PACELINE_MEMBER": member})
    assert server == identities[1]
    assert (server.role, server.local_index, server.local_members) == ("server", 1, 2)
    assert server.coordinator.startswith(f"{server.address}:")
    assert len(server.key) == 64


def test_one_failure_ends_all(ray_cluster: str, tmp_path: Path) -> None:
    (tmp_path / "members").mkdir()
    heard = tmp_path / "heard"
    wait = f"import os, time\nwhile not os.path.exists({str(heard)!r}): time.sleep(0.05)"
    scripts = {
        "worker0": "import os, time; print(os.getpid(), flush=True); time.sleep(300)",
        "worker1": f"{wait}\nraise SystemExit('gone wrong')",
    }
    pids: list[int] = []

    def output(name: str, stream: str, content: bytes) -> None:
        if name == "worker0":
            pids.append(int(content))
            heard.touch()

    with launcher.placed(2) as placed:
        identities = placed.identities(workers=2, run=tmp_path)
        commands = [command(identity, scripts[identity.name]) for identity in identities]
        with pytest.raises(MemberError, match=r"worker1 exited 1(.|\n)*gone wrong"):
            placed.supervise(commands, tmp_path, output=output)
    assert pids
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pids[0]}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pids[0]}")


def test_a_lost_actor_is_a_lost_member(ray_cluster: str, tmp_path: Path) -> None:
    import ray

    (tmp_path / "members").mkdir()
    with launcher.placed(2) as placed:
        identities = placed.identities(workers=2, run=tmp_path)
        commands = [command(identity, "import time; time.sleep(300)") for identity in identities]
        lose = iter([placed._actors[1]])
        with pytest.raises(MemberError, match=r"worker1(.|\n)*was lost: ActorDiedError"):
            placed.supervise(
                commands,
                tmp_path,
                output=lambda *said: None,
                tick=lambda: [ray.kill(actor) for actor in lose],
            )


def test_an_interruption_reaches_the_workers(ray_cluster: str, tmp_path: Path) -> None:
    (tmp_path / "members").mkdir()
    script = (
        "import time\n"
        "print('ready', flush=True)\n"
        "try: time.sleep(300)\n"
        "except KeyboardInterrupt: print('saved')\n"
    )
    said: dict[str, bytes] = {}
    left = [signal.SIGINT]

    def output(member: str, stream: str, content: bytes) -> None:
        said[member] = said.get(member, b"") + content

    def tick() -> None:
        if left and len(said) == 2:
            os.kill(os.getpid(), left.pop())

    with launcher.placed(2) as placed:
        identities = placed.identities(workers=2, run=tmp_path)
        commands = [command(identity, script) for identity in identities]
        with pytest.raises(Interrupted):
            placed.supervise(commands, tmp_path, output=output, tick=tick)
    assert set(said.values()) == {b"ready\nsaved\n"}


def test_no_cluster_is_said_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra paceline[ray]")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(MissingError, match="ray start --head"), launcher.placed(2):
            pass
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingError, match=r"pip install paceline\[ray\]"), launcher.placed(2):
        pass


@given(st.lists(st.integers(1, 64), min_size=1, max_size=8), st.integers(1, 32))
def test_cores_each_is_the_most_that_fits(nodes: list[int], members: int) -> None:
    cores = launcher.cores_each(nodes, members)
    fits = sum(have // cores for have in nodes)
    assert fits >= members or cores == 1
    assert sum(have // (cores + 1) for have in nodes) < members
