"""A job among strangers: whatever they send to its ports, it trains on as without them.

`benchmarks/siege.py` does the same at length: a hundred thousand messages to each port.
"""

import os
import sys
from pathlib import Path

import pytest

from paceline.launch.interfaces import ELSEWHERE, source_towards

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import besieged
import siege
import siege_before


def besiege(tmp_path, name, messages):
    if besieged.JOBS[name].apart and source_towards(ELSEWHERE) is None:
        pytest.skip("this host has no address but loopback")
    if besieged.JOBS[name].mpirun and not besieged.has_mpirun():
        pytest.skip("mpirun is not installed")
    row = siege.besiege(name, tmp_path, messages)
    assert all(count >= messages for count in row["messages"].values())
    assert not [check for check in siege.checks(row) if not check["holds"]]


@pytest.mark.parametrize(
    "name", [pytest.param("tcp", marks=pytest.mark.slow), "colocated", "curve", "ring"]
)
def test_strangers_at_every_port_change_nothing(tmp_path, name):
    besiege(tmp_path, name, 400)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", besieged.JOBS)
def test_a_hundred_thousand_malformed_messages_change_nothing(tmp_path, name):
    besiege(tmp_path, name, 100_000)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", siege_before.SIEGES)
def test_neither_do_they_before_members_have_met(tmp_path, name):
    if name == "meeting" and os.geteuid() != 0:
        pytest.skip("only root can call as another user")
    row = siege_before.SIEGES[name](tmp_path, 20_000)
    assert all(count >= 20_000 for count in row["messages"].values())
    assert not [check for check in siege_before.checks(row) if not check["holds"]]
