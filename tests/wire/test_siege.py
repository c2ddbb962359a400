"""Whatever unauthenticated peers send to the ports of a job, it trains as without them.

`benchmarks/siege.py` does the same at length: a hundred thousand messages to each port.
"""

import sys
from pathlib import Path

import pytest

from paceline.launch.interfaces import ELSEWHERE, source_towards

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import besieged
import siege


def besiege(tmp_path, name, messages):
    if besieged.JOBS[name].apart and source_towards(ELSEWHERE) is None:
        pytest.skip("this host has no address but loopback")
    if besieged.JOBS[name].mpirun and not besieged.has_mpirun():
        pytest.skip("mpirun is not installed")
    row = siege.besiege(name, tmp_path, messages)
    assert all(count >= messages for count in row["messages"].values())
    assert not [check for check in siege.checks(row) if not check["holds"]]


@pytest.mark.parametrize(
    "name", [pytest.param("tcp", marks=pytest.mark.slow), "colocated", "encrypted", "ring"]
)
def test_strangers_at_every_port_change_nothing(tmp_path, name):
    besiege(tmp_path, name, 400)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", besieged.JOBS)
def test_thousands_of_malformed_messages_change_no_job(tmp_path, name):
    besiege(tmp_path, name, 3_000)
