"""The tour: what it asks, and that its answer is one verdict and a page."""

import json
from pathlib import Path

import pytest

from paceline import bench, spec
from paceline.bench import grid
from paceline.cli.main import main

DEMO = Path(bench.__file__).parent / "demo.toml"


def test_it_repeats_and_its_hosts_have_devices_of_their_own():
    """Four workers on two cores show neither a network nor a server."""
    demo = spec.load_comparison(DEMO)
    cells = [cell.experiment for cell in grid.cells(demo)]
    assert demo.compare.repeats >= 2
    emulated = [one for one in cells if one.engine == "tunnel"]
    assert {one.cluster.device for one in emulated} == {"k80"}
    assert max(one.cluster.workers for one in emulated) == 4
    assert max(one.cluster.workers for one in cells if one.engine == "here") == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_ends_in_one_verdict_and_a_page(tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--no-tunnel", "--steps", "12", "--out", str(tmp_path / "demo"), "--json"])
    table = json.loads(capsys.readouterr().out)
    assert {row["architecture"] for row in table["rows"]} >= {"single", "ring"}
    assert 1 <= len(table["verdict"].splitlines()) <= 3
    assert (tmp_path / "demo" / "report" / "index.html").exists()
