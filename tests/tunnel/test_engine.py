"""Members run unchanged on emulated hosts, and the record says what was emulated."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline import engines, spec
from paceline.errors import SpecError
from paceline.record import RunFolder
from paceline.telemetry.queues import HEADER_BYTES
from paceline.tunnel.namespaces import list_ours, sweep
from tests.support.toy_device import GRADIENT_BYTES, write_toy_device

pytestmark = [pytest.mark.tunnel, pytest.mark.quiet]


@pytest.fixture
def toy_device(tmp_path: Path) -> str:
    """A device on which a step of the tutorial CNN takes 30 ms."""
    return write_toy_device(tmp_path, forward_seconds=0.002, backward_seconds=0.004)


def experiment(device: str, architecture: str, **cluster: object) -> spec.Experiment:
    tables = {
        "engine": "tunnel",
        "architecture": architecture,
        "workload": {"model": "tutorial-cnn", "data": "synthetic", "batch": 32, "steps": 8},
        "cluster": {"workers": 2, "link": "500mbit", "device": device, **cluster},
        "measurement": {"warmup_steps": 2, "sample_seconds": 0.2},
    }
    return spec.from_tables(tables, "test")


def test_a_ring_moves_what_the_closed_form_says(rights, toy_device, tmp_path):
    asked = experiment(toy_device, "ring")
    folder = engines.run(asked, tmp_path / "run")
    summary = folder.summary()
    assert summary.status == "finished"
    assert [member.host for member in summary.members] == ["worker0", "worker1"]
    # Worker 1 sends its half of each all-reduce and no first weights.
    member = summary.members[1]
    payload = member.bytes_sent - HEADER_BYTES * member.packets_sent
    assert payload == pytest.approx(asked.workload.steps * GRADIENT_BYTES, rel=0.05)
    assert isinstance(summary.notes, list)
    assert any("emulated device" in note for note in summary.notes)
    assert summary.loss is None, "nothing was computed"
    assert all(step.loss is None for step in folder.steps("worker0"))
    sent = sum(sample.bytes_sent or 0 for sample in folder.series("worker1"))
    assert sent == pytest.approx(member.bytes_sent, rel=0.05)


@pytest.mark.parametrize("architecture", ["server", "server:placement=colocated"])
def test_servers_run_in_hosts_of_their_own(rights, toy_device, tmp_path, architecture):
    servers = 0 if "colocated" in architecture else 1
    asked = experiment(toy_device, architecture, servers=servers)
    folder = engines.run(asked, tmp_path / "run")
    hosts = {member.name: member.host for member in folder.members()}
    assert len(set(hosts.values())) == 2 + servers
    assert len(folder.steps("worker1")) == asked.workload.steps


def test_dilation_slows_the_world_and_not_the_figures(rights, toy_device, tmp_path):
    began = time.monotonic()
    slow = engines.run(experiment(toy_device, "ring", dilation=4.0), tmp_path / "slow")
    steps = slow.steps("worker0")
    reported = steps[-1].end_seconds - steps[0].start_seconds
    assert 4 * reported < time.monotonic() - began, "the run really took four times as long"
    compute = [s.breakdown_seconds["forward"] + s.breakdown_seconds["backward"] for s in steps[2:]]
    # Four times 30 ms passed; a machine may be late, but never early.
    assert min(compute) >= 0.9 * 0.030
    assert any("dilation 4" in note for note in slow.summary().notes)


def test_a_link_changes_at_a_step(rights, toy_device, tmp_path):
    tables = {"member": "worker1", "at_step": 2, "kind": "link", "link": "100mbit"}
    asked = spec.replace(experiment(toy_device, "ring"), faults=[tables])
    folder = engines.run(asked, tmp_path / "run")
    (event,) = [event for event in folder.events() if event.kind == "link"]
    assert "worker1" in event.text
    assert "100 Mbit/s" in event.text


@pytest.mark.parametrize(
    ("device", "fault", "complaint"),
    [
        ("k80", {"member": "worker7", "kind": "slow"}, 'no member "worker7"'),
        ("cpu", {"member": "worker0", "kind": "slow"}, "no emulated device"),
        ("k8", {"member": "worker0", "kind": "slow"}, 'did you mean "k80"'),
    ],
)
def test_what_would_silently_not_happen_is_refused(rights, tmp_path, device, fault, complaint):
    asked = spec.replace(experiment(device, "ring"), faults=[{**fault, "at_step": 1}])
    with pytest.raises(SpecError, match=complaint):
        engines.run(asked, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_script_of_ones_own_runs_there(rights, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import socket, paceline\n"
        "session = paceline.init()\n"
        "print('I am', session.identity.host, [name for _, name in socket.if_nameindex()])\n"
    )
    workload = spec.Workload(script=spec.Script(path=str(script)))
    asked = spec.replace(experiment("cpu", "ring"), workload=workload)
    said: list[bytes] = []
    engines.run(
        asked, tmp_path / "run", output=lambda member, stream, content: said.append(content)
    )
    lines = b"".join(said).decode().splitlines()
    assert sorted(line for line in lines if line.startswith("I am")) == [
        f"I am worker{rank} ['lo', 'eth0']" for rank in range(2)
    ]


def test_members_share_the_cores_of_this_machine(rights, tmp_path):
    asked = spec.replace(experiment("cpu", "ring"), model="tests.support.user_models:on_one_thread")
    assert engines.run(asked, tmp_path / "run").summary().status == "finished"


def test_killing_the_parent_ends_the_members_and_the_next_start_sweeps(rights, tmp_path):
    path = tmp_path / "run"
    argv = [sys.executable, "-m", "paceline", "train", "--on", "tunnel", "--device", "k80"]
    argv += ["--model", "resnet50", "--data", "synthetic", "--steps", "1000", "--workers", "2"]
    argv += ["--architecture", "ring", "--out", str(path)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as parent:
        pids = _pids_of_members(path, count=2)
        parent.kill()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if _runs(pid)], "members outlived their launcher"
    swept = sweep()
    assert {name.rpartition("-")[2] for name in swept} >= {"switch", "worker0", "worker1"}
    assert not set(swept) & set(list_ours())


def _pids_of_members(path: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (path / "run.json").exists():
            pids = [m.pid for m in RunFolder(path).members() if m.pid is not None]
            if len(pids) == count:
                return pids
        time.sleep(0.1)
    pytest.fail("the members did not start")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (ProcessLookupError, FileNotFoundError):
        return False
