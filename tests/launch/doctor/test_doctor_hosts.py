"""The doctor on two hosts that are network namespaces, with real causes planted in them.

Needs root, iproute2 and nftables.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

A, B = "10.77.0.1", "10.77.0.2"
PORT = 7718


class Hosts:
    """Two namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = {A: f"pacetest-{os.getpid()}-a", B: f"pacetest-{os.getpid()}-b"}

    def start(self) -> None:
        a, b = self.names.values()
        run("ip", "netns", "add", a)
        run("ip", "netns", "add", b)
        run("ip", "-n", a, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", b)
        for address, name in self.names.items():
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")

    def end(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def filter(self, address: str, rule: str) -> None:
        """Drop what arrives at `address` and matches `rule`."""
        self.inside(address, "nft", "add table inet t")
        self.inside(address, "nft", "add chain inet t c { type filter hook input priority 0 ; }")
        self.inside(address, "nft", f"add rule inet t c {rule} drop")

    def inside(self, address: str, *line: str) -> None:
        run("ip", "netns", "exec", self.names[address], *line)

    def doctor(
        self, changed: dict[str, dict[str, str]] | None = None, deadline: str = "25s"
    ) -> tuple[dict[str, Any], dict[str, str], dict[str, int]]:
        """The same command on both hosts: the answer of the first, all errors, exit statuses."""
        flags = ["--hosts", f"{A},{B}", "--port", str(PORT), "--deadline", deadline, "--json"]
        started = {}
        for address, name in self.names.items():
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **(changed or {}).get(address, {})}
            line = ["ip", "netns", "exec", name, sys.executable, "-m", "paceline", "doctor", *flags]
            started[address] = subprocess.Popen(
                line,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        try:
            said = {a: process.communicate(timeout=60) for a, process in started.items()}
        finally:
            for process in started.values():
                process.kill()
                process.wait()
        answer = json.loads(said[A][0]) if said[A][0] else {}
        errors = {address: text for address, (_, text) in said.items()}
        return answer, errors, {a: process.returncode for a, process in started.items()}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    missing = [name for name in ("ip", "nft") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, iproute2 and nftables; missing: {', '.join(missing) or 'root'}")
    made = Hosts()
    try:
        made.start()
        yield made
    finally:
        made.end()


def run(*line: str) -> None:
    done = subprocess.run(line, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0 and "not supported" in done.stderr:
        pytest.skip(f"{' '.join(line[:3])}: {done.stderr.strip()}")
    assert done.returncode == 0, f"{' '.join(line)}: {done.stderr}"


def kinds(answer: dict[str, Any]) -> set[str]:
    return {finding["kind"] for finding in answer["findings"]}


def test_healthy_hosts(hosts: Hosts) -> None:
    answer, errors, statuses = hosts.doctor()
    assert statuses == {A: 0, B: 0}, errors
    assert answer["healthy"]
    first, second = answer["members"]
    assert (first["address"], second["address"]) == (A, B)
    assert first["interface"] == "eth0"
    assert "leave from it" in second["interface_why"]
    assert all(pair["bandwidth_bits_per_second"] > 0 for pair in answer["pairs"])


def test_a_blocked_port_is_named(hosts: Hosts) -> None:
    hosts.filter(B, "tcp dport 1024-65535 ct state new")
    answer, _, statuses = hosts.doctor()
    assert statuses == {A: 1, B: 1}
    assert kinds(answer) == {"blocked-port"}
    (finding,) = answer["findings"]
    assert f"worker0 cannot reach worker1 on {B}" in finding["problem"]
    assert "a firewall blocks the port" in finding["problem"]
    assert "open TCP ports" in finding["fix"]


def test_a_blocked_coordinator_is_named_on_both_sides(hosts: Hosts) -> None:
    hosts.filter(A, f"tcp dport {PORT}")
    answer, errors, statuses = hosts.doctor(deadline="4s")
    assert statuses == {A: 1, B: 2}
    assert kinds(answer) == {"missing-member"}
    assert f"a firewall blocks port {PORT}" in errors[B]
    assert f"open TCP port {PORT} on worker0's host" in errors[B]


def test_a_wrong_interface_and_another_torch_are_named(hosts: Hosts, tmp_path: Path) -> None:
    hosts.inside(B, "ip", "link", "add", "docker0", "type", "veth", "peer", "inner0")
    hosts.inside(B, "ip", "link", "set", "inner0", "up")
    hosts.inside(B, "ip", "address", "add", "172.31.7.1/24", "dev", "docker0")
    hosts.inside(B, "ip", "link", "set", "docker0", "up")
    other_torch = tmp_path / "torch-1.2.3.dist-info"
    other_torch.mkdir()
    (other_torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    python_path = f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}"
    changed = {B: {"PACELINE_ADDRESS": "docker0", "PYTHONPATH": python_path}}
    answer, _, statuses = hosts.doctor(changed)
    assert statuses == {A: 1, B: 1}
    assert kinds(answer) == {"wrong-interface", "torch-versions"}
    interface, torch = sorted(answer["findings"], key=lambda finding: -len(finding["kind"]))
    assert (
        "announced 172.31.7.1 (docker0), because PACELINE_ADDRESS says so" in interface["problem"]
    )
    assert f"{B} (eth0) answers" in interface["problem"]
    assert "PACELINE_ADDRESS=eth0" in interface["fix"]
    assert "1.2.3: worker1" in torch["problem"]
