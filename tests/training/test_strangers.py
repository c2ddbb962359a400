"""A job among strangers: whatever they send to its ports, it trains on as without them.

`benchmarks/siege.py` does the same at length: a hundred thousand messages to each port.
"""

import sys
from pathlib import Path

import pytest

from paceline.launch.interfaces import ELSEWHERE, source_towards

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import siege


def besiege(tmp_path, name, messages):
    if siege.JOBS[name].apart and source_towards(ELSEWHERE) is None:
        pytest.skip("this host has no address but loopback")
    row = siege.besiege(name, tmp_path, messages)
    assert all(count >= messages for count in row["messages"].values())
    assert not [check for check in siege.checks(row) if not check["holds"]]


@pytest.mark.parametrize("name", ["tcp", "colocated", "curve", "ring"])
def test_strangers_at_every_port_change_nothing(tmp_path, name):
    besiege(tmp_path, name, 400)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", siege.JOBS)
def test_a_hundred_thousand_malformed_messages_change_nothing(tmp_path, name):
    besiege(tmp_path, name, 100_000)
