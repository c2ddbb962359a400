"""Findings from facts alone: each cause is named with its fix, and a healthy job has none."""

from typing import Any

import msgspec
import pytest

from paceline.diagnose.doctor import (
    Examination,
    MemberFacts,
    Pair,
    Requirements,
    findings,
    require_healthy,
)
from paceline.diagnose.doctor.findings import CHECKS
from paceline.errors import MissingError

GIB = 2**30


def facts(index: int, **changes: Any) -> MemberFacts:
    healthy = MemberFacts(
        member=f"worker{index}",
        host=f"node{index}",
        address=f"10.0.0.{index}",
        interface="eth0",
        interface_why="it carries the default route",
        addresses={"127.0.0.1": "lo", f"10.0.0.{index}": "eth0", f"10.9.0.{index}": "ib0"},
        versions={"python": "3.11.7", "torch": "2.13.0", "paceline": "0.1.0"},
        cores=8,
        host_cores=8,
        threads=8,
        local_members=1,
        shared_memory_bytes=GIB,
        shared_memory_free_bytes=GIB,
        ports=(32768, 60999),
        missing_rights=(),
        container_engines=("podman",),
    )
    return msgspec.structs.replace(healthy, **changes)


def pair(source: int, target: int, **changes: Any) -> Pair:
    healthy = {"round_trip_seconds": 1e-4, "clock_offset_seconds": 1e-3}
    return Pair(
        source=f"worker{source}",
        target=f"worker{target}",
        address=f"10.0.0.{target}:40000",
        **{**({} if "problem" in changes else healthy), **changes},
    )


def examination(
    changed: dict[int, dict[str, Any]] | None = None,
    pairs: dict[tuple[int, int], dict[str, Any]] | None = None,
    **changes: Any,
) -> Examination:
    """Three hosts, all well but for what is changed."""
    changed, pairs = changed or {}, pairs or {}
    ways = [(i, j) for i in range(3) for j in range(3) if i != j]
    return Examination(
        facts=[facts(index, **changed.get(index, {})) for index in range(3)],
        pairs=[pair(*way, **pairs.get(way, {})) for way in ways],
        coordinator="10.0.0.0:7718",
        on_one_host=False,
        **changes,
    )


PLANTED: dict[str, tuple[Examination, Requirements, str, str, str]] = {
    "missing-member": (
        examination(missing=["worker2"]),
        Requirements(),
        "error",
        "worker2 never reached worker0 at 10.0.0.0:7718",
        "what they printed",
    ),
    "blocked-port": (
        examination(pairs={(0, 1): {"problem": "dropped"}, (2, 1): {"problem": "dropped"}}),
        Requirements(),
        "error",
        "worker0, worker2 cannot reach worker1 on node1 at 10.0.0.1:40000: packets are dropped",
        "open TCP ports 32768-60999 on node1",
    ),
    "no-route": (
        examination(pairs={(0, 1): {"problem": "unroutable"}}),
        Requirements(),
        "error",
        "no route",
        "PACELINE_ADDRESS",
    ),
    "wrong-interface": (
        examination(
            pairs={(0, 1): {"problem": "unroutable", "answers_at": "10.9.0.1"}},
        ),
        Requirements(),
        "error",
        "worker1 on node1 announced 10.0.0.1 (eth0), because it carries the default route; "
        "but 10.9.0.1 (ib0) answers",
        "PACELINE_ADDRESS=ib0 on node1",
    ),
    "torch-versions": (
        examination({2: {"versions": {"python": "3.11.2", "torch": "2.6.0", "paceline": "0.1.0"}}}),
        Requirements(),
        "error",
        "2.13.0: worker0, worker1; 2.6.0: worker2",
        "install torch 2.13.0 for worker2",
    ),
    "python-versions": (
        examination(
            {0: {"versions": {"python": "3.12.1", "torch": "2.13.0", "paceline": "0.1.0"}}}
        ),
        Requirements(),
        "warning",
        "3.11: worker1, worker2; 3.12: worker0",
        "install python 3.11 for worker0",
    ),
    "shared-memory": (
        examination({1: {"shared_memory_bytes": 64 * 2**20, "local_members": 2, "threads": 4}}),
        Requirements(),
        "error",
        "/dev/shm on node1 (worker1) has 67.1 MB, and the job needs 268 MB",
        "--shm-size",
    ),
    "clock": (
        examination(pairs={(0, 2): {"clock_offset_seconds": -2.0}}),
        Requirements(),
        "warning",
        "the clock of node2 (worker2) is 2.00 s behind worker0's",
        "chrony",
    ),
    "threads": (
        examination({1: {"local_members": 4}}),
        Requirements(),
        "warning",
        "4 members on node1 would run 32 threads on 8 cores",
        "OMP_NUM_THREADS=2",
    ),
    "tunnel-rights": (
        examination({0: {"missing_rights": ("CAP_NET_ADMIN",)}}),
        Requirements(tunnel=True),
        "error",
        "the tunnel cannot be built on node0: CAP_NET_ADMIN missing",
        "root",
    ),
    "container-engine": (
        examination(),
        Requirements(container="apptainer"),
        "error",
        "apptainer cannot be used on node0; there is: podman",
        "install and start apptainer",
    ),
    "busy-machine": (
        examination({1: {"load": 14.0}}),
        Requirements(),
        "warning",
        "node1 is busy already: 14.0 threads want its 8 cores",
        "uptime",
    ),
    "slow-link": (
        examination(
            pairs={
                (i, j): {"bandwidth_bits_per_second": 1e8 if (i, j) == (1, 2) else 1e10}
                for i in range(3)
                for j in range(3)
            }
        ),
        Requirements(),
        "warning",
        "worker1 to worker2 carries 0.10 Gbit/s, where the others carry 10.00",
        "ethtool",
    ),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_cause_is_named_and_nothing_else(kind: str) -> None:
    planted, needs, severity, problem, fix = PLANTED[kind]
    found = findings(planted, needs)
    assert {finding.kind for finding in found} == {kind}
    assert found[0].severity == severity
    assert problem in found[0].problem
    assert fix in found[0].fix


def test_every_check_is_planted_above() -> None:
    silent = [
        check.__name__
        for check in CHECKS
        if not any(list(check(planted, needs)) for planted, needs, *_ in PLANTED.values())
    ]
    assert silent == []


def test_a_healthy_job_has_no_findings() -> None:
    assert findings(examination()) == []
    assert require_healthy(examination()) == []


def test_loopback_announced_to_other_hosts_is_a_wrong_interface() -> None:
    planted = examination({1: {"address": "127.0.0.1", "interface": "lo"}})
    pairs = [
        msgspec.structs.replace(p, problem="refused", address="127.0.0.1:40000")
        if p.target == "worker1"
        else p
        for p in planted.pairs
    ]
    (finding,) = findings(msgspec.structs.replace(planted, pairs=pairs))
    assert finding.kind == "wrong-interface"
    assert "nowhere but to the host itself" in finding.problem


def test_errors_stop_the_job_and_warnings_do_not() -> None:
    with pytest.raises(MissingError, match="worker1 on node1") as caught:
        require_healthy(PLANTED["blocked-port"][0])
    assert "open TCP ports" in caught.value.fix
    (left,) = require_healthy(PLANTED["clock"][0])
    assert left.kind == "clock"


def test_rights_are_a_note_where_nobody_asked_for_the_tunnel() -> None:
    (finding,) = findings(PLANTED["tunnel-rights"][0])
    assert finding.severity == "note"
