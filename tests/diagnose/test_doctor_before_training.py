"""Training on two hosts (network namespaces): it works, and where it cannot it does not start."""

import json
from pathlib import Path
from typing import Any

import pytest

A, B = "10.77.0.1", "10.77.0.2"
PORT = "29511"
TRAIN = ["train", "--model", "mnist-dnn", "--data", "synthetic", "--global-batch", "16"]
TRAIN += ["--steps", "4", "--architecture", "ring", "--threads", "1", "--json", "--out", "run"]


def places() -> dict[str, dict[str, str]]:
    """What torch's own variables say on each host."""
    shared = {"MASTER_ADDR": A, "MASTER_PORT": PORT, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    shared["PACELINE_KEY"] = "a secret of these hosts"
    return {
        address: {**shared, "RANK": str(rank), "LOCAL_RANK": "0"}
        for rank, address in enumerate((A, B))
    }


@pytest.mark.slow
def test_healthy_hosts_train_without_a_shared_file_system(hosts: Any, tmp_path: Path) -> None:
    # Each host has its own files at /mnt, in a mount namespace that ends with it.
    own_files = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /mnt && exec "$@"', "sh"]
    line = [*TRAIN[:-1], "/mnt/run"]
    said, statuses = hosts.run(line, places(), cwd=str(tmp_path), before=own_files)
    assert statuses == {A: 0, B: 0}, said
    answer = json.loads(said[A][0])
    assert (answer["workers"], answer["status"]) == (2, "finished")
    assert [member["name"] for member in answer["members"]] == ["worker0", "worker1"]
    assert {member["status"] for member in answer["members"]} == {"finished"}
    assert said[B][0] == ""


def test_a_blocked_port_stops_the_job_before_step_1(hosts: Any, tmp_path: Path) -> None:
    hosts.filter(B, "tcp dport 1024-65535 ct state new")
    said, statuses = hosts.run(TRAIN, places(), cwd=str(tmp_path))
    assert statuses == {A: 2, B: 2}, said
    for _, errors in said.values():
        assert "worker0 cannot reach worker1" in errors, said
        assert "fix: open TCP ports" in errors
