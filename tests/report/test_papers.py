"""The page of a paper's experiment opens with its figure, whichever verb writes it."""

import re
from importlib import import_module

import msgspec
import pytest

from paceline import spec
from paceline.bench import grid, papers
from paceline.bench.compare import NETWORK, CellOutcome, ComparisonFolder
from paceline.cli.main import main
from tests.bench.test_compare import make_up


@pytest.fixture(autouse=True)
def without_files(monkeypatch):
    """Drawing every chart as a file takes seconds, and is tested elsewhere."""
    module = import_module("paceline.report.write")
    monkeypatch.setattr(module, "draw_all", lambda drawings: None)


def page_of(folder, tmp_path):
    """What `paceline report` writes: title, headings, charts."""
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder.path), "--out", str(tmp_path / "again")])
    assert not ended.value.code
    text = (tmp_path / "again" / "index.html").read_text()
    return {
        "title": re.findall("<title>([^<]+)", text)[0],
        "headings": re.findall("<h[23]>([^<]+)", text),
        "charts": re.findall(r'data-chart="([^"]+)"', text),
        "text": text,
    }


def test_report_shows_the_figure_that_reproduce_shows(tmp_path):
    preset = papers.load("p2-adult").quickly()
    preset = spec.vary(preset, {}, {"peers": (), "workers": (1, 2)})
    folder = ComparisonFolder.create(tmp_path / "p2-adult", preset)
    for cell in grid.cells(preset):
        make_up(cell.experiment, folder.run_path(cell, 0))
        folder.add(CellOutcome(cell=cell.key, repeat=0, seconds=1.0))

    page = page_of(folder, tmp_path)

    assert page["title"].startswith("P2, Figure Adult: speed-up against processes")
    assert page["charts"][:2] == ["figure-speedup", "figure-samples-per-second"]
    assert "Figure Adult of P2, redrawn" in " ".join(page["headings"])
    assert "What differs from the paper: 1 to 4 processes" in page["text"]


def test_report_shows_a_figure_of_networks(tmp_path):
    folder = ComparisonFolder.create(tmp_path / "p3-fig2", papers.load("p3-fig2"))
    row = {"bytes": 64, "bits_per_second": 1e8, "both_bits_per_second": 9e7}
    curves = {"1gbit": [{"rows": [row, {**row, "bytes": 128}]}]}
    (folder.path / NETWORK).write_bytes(msgspec.json.encode(curves))

    page = page_of(folder, tmp_path)

    assert page["title"].startswith("P3, Figure 2")
    assert page["charts"] == ["figure-net"]
