"""The doctor on two hosts that are network namespaces, with real causes planted in them."""

import os
from pathlib import Path
from typing import Any

A, B = "10.77.0.1", "10.77.0.2"
PORT = 7718


def kinds(answer: dict[str, Any]) -> set[str]:
    # Whether the machine that runs the tests is busy is nothing they plant.
    return {finding["kind"] for finding in answer["findings"]} - {"busy-machine"}


def test_healthy_hosts(hosts: Any) -> None:
    answer, errors, statuses = hosts.doctor()
    assert statuses == {A: 0, B: 0}, errors
    assert answer["healthy"]
    first, second = answer["members"]
    assert (first["address"], second["address"]) == (A, B)
    assert first["interface"] == "eth0"
    assert "leave from it" in second["interface_why"]
    assert all(pair["bandwidth_bits_per_second"] > 0 for pair in answer["pairs"])


def test_a_blocked_port_is_named(hosts: Any) -> None:
    hosts.filter(B, "tcp dport 1024-65535 ct state new")
    answer, _, statuses = hosts.doctor()
    assert statuses == {A: 1, B: 1}
    assert kinds(answer) == {"blocked-port"}
    (finding,) = [f for f in answer["findings"] if f["kind"] != "busy-machine"]
    assert f"worker0 cannot reach worker1 on {B}" in finding["problem"]
    assert "a firewall blocks the port" in finding["problem"]
    assert "open TCP ports" in finding["fix"]


def test_a_blocked_coordinator_is_named_on_both_sides(hosts: Any) -> None:
    hosts.filter(A, f"tcp dport {PORT}")
    answer, errors, statuses = hosts.doctor(deadline="4s")
    assert statuses == {A: 1, B: 2}
    assert kinds(answer) == {"missing-member"}
    assert f"a firewall blocks port {PORT}" in errors[B]
    assert f"open TCP port {PORT} on worker0's host" in errors[B]


def test_a_wrong_interface_and_another_torch_are_named(hosts: Any, tmp_path: Path) -> None:
    hosts.inside(B, "ip", "link", "add", "docker0", "type", "veth", "peer", "inner0")
    hosts.inside(B, "ip", "link", "set", "inner0", "up")
    hosts.inside(B, "ip", "address", "add", "172.31.7.1/24", "dev", "docker0")
    hosts.inside(B, "ip", "link", "set", "docker0", "up")
    other_torch = tmp_path / "torch-1.2.3.dist-info"
    other_torch.mkdir()
    (other_torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    python_path = f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"
    changed = {B: {"PACELINE_ADDRESS": "docker0", "PYTHONPATH": python_path}}
    answer, _, statuses = hosts.doctor(changed)
    assert statuses == {A: 1, B: 1}
    assert kinds(answer) == {"wrong-interface", "torch-versions"}
    found = [f for f in answer["findings"] if f["kind"] != "busy-machine"]
    interface, torch = sorted(found, key=lambda finding: -len(finding["kind"]))
    assert (
        "announced 172.31.7.1 (docker0), because PACELINE_ADDRESS says so" in interface["problem"]
    )
    assert f"{B} (eth0) answers" in interface["problem"]
    assert "PACELINE_ADDRESS=eth0" in interface["fix"]
    assert "1.2.3: worker1" in torch["problem"]
