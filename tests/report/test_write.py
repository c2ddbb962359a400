"""A report: the page stands alone, every chart is a file too, absent stays absent."""

import re
import struct

import pytest

from paceline import report
from paceline.bench.statistics import estimate
from paceline.bench.table import Row
from paceline.report import drawing
from paceline.report.charts import breakdown_values
from paceline.report.page import compose
from paceline.report.rows import groups, labels
from tests.support import webdriver
from tests.support.synthetic import Times, synchronous_run


@pytest.fixture
def runs(tmp_path):
    single = synchronous_run(tmp_path / "single-1", workers=1, architecture="single")
    scaled = [
        synchronous_run(tmp_path / f"ring-{n}", workers=n, exchange_seconds=0.004 * n)
        for n in (2, 4)
    ]
    return [single, *scaled]


def test_every_chart_of_the_page_is_also_svg_and_png(runs, tmp_path):
    index = report.write_runs(runs[:2], tmp_path / "out")
    drawn = set(re.findall(r'data-chart="([^"]+)"', index.read_text()))
    files = {path.name for path in (tmp_path / "out" / "charts").iterdir()}
    assert drawn
    assert files == {f"{name}.{kind}" for name in drawn for kind in ("svg", "png")}
    png = next((tmp_path / "out" / "charts").glob("*.png")).read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert min(width, height) > 200


def test_many_charts_are_drawn_by_helpers(tmp_path, monkeypatch):
    mark = {"data": {"values": [{"x": 1}]}, "mark": "point", "encoding": {"x": {"field": "x"}}}
    monkeypatch.setattr(drawing, "WORTH_PROCESSES", 2)
    drawing.draw_all([drawing.Drawing(path=str(tmp_path / f"{n}"), spec=mark) for n in range(3)])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{n}.{kind}" for n in range(3) for kind in ("svg", "png")}


def test_the_page_asks_the_network_for_nothing(runs, tmp_path):
    page = report.write_runs(runs, tmp_path / "out", files=False).read_text()
    assert not re.findall(r'(?:src|href)\s*=\s*["\']?https?:', page)
    assert "@import" not in page


@pytest.mark.skipif(webdriver.MISSING is not None, reason=str(webdriver.MISSING))
def test_a_browser_draws_every_chart_that_is_in_view(runs, tmp_path):
    index = report.write_runs(runs, tmp_path / "out", files=False)
    with webdriver.browser(tmp_path / "profile") as browser:
        browser.open(index.as_uri())
        drawn = "document.querySelectorAll('.chart[data-chart^=throughput] svg path').length"
        browser.wait("a chart", lambda: browser.run(drawn) > 3)
        assert browser.logged_errors() == []
        assert browser.text(".verdict")


def test_verdict_comes_first(tmp_path):
    slow = {"worker1": Times(forward=0.05)}
    run = synchronous_run(tmp_path / "slow", slow=slow)
    page = report.write_runs([run], tmp_path / "out", files=False).read_text()
    verdict = page.index('class="verdict"')
    assert "Waiting for worker1" in page[verdict : verdict + 200]
    assert verdict < page.index('class="tiles"') < page.index('class="chart"')


def test_names_from_a_run_cannot_break_the_page(tmp_path):
    run = synchronous_run(tmp_path / "run")
    experiment = run.path / "experiment.toml"
    experiment.write_text(experiment.read_text() + '\n# </script><script>alert("x")</script>\n')
    page = report.write_runs([run], tmp_path / "out", files=False).read_text()
    assert '<script>alert("x")' not in page


def test_one_workers_run_is_the_baseline_of_the_others(runs):
    rows = {row.cell: row for row in report.from_runs(runs).rows}
    expected = runs[1].summary().samples_per_second / runs[0].summary().samples_per_second
    assert rows["ring-2"].speedup == pytest.approx(expected)
    assert rows["ring-2"].efficiency == pytest.approx(expected / 2)


def test_breakdown_parts_sum_to_the_step(runs):
    (group,) = groups(report.from_runs(runs).rows)
    names = labels(group.rows)
    for row in group.rows:
        parts = [v["ms"] for v in breakdown_values(group) if v["label"] == names[row.cell]]
        assert sum(parts) == pytest.approx(1e3 * row.step_seconds, rel=0.01)


def test_a_failed_row_is_shown_with_its_reason(runs):
    table = report.from_runs(runs)
    table.rows.append(_row("lost", failed="worker1 was ended by signal 9"))
    page = compose(table)
    assert [reason for _, reason in page.failures] == ["worker1 was ended by signal 9"]
    assert len(page.cells) == 3


def test_a_grid_becomes_a_chart_per_network_and_a_line_per_architecture():
    rows = [
        _row(f"{a}-{w}-{link}", architecture=a, workers=w, link=link, rate=100.0 * w)
        for a in ("ring", "server")
        for w in (1, 2, 4)
        for link in ("1gbit", "10gbit")
    ]
    found = groups(rows)
    assert [group.title for group in found] == ["1gbit", "10gbit"]
    assert all(set(group.series.values()) == {"ring", "server"} for group in found)
    assert all(group.axis == "workers" for group in found)
    assert len(set(labels(rows).values())) == len(rows)


def test_batches_are_the_axis_where_nothing_else_varies():
    rows = [_row(f"b{b}", batch=b, global_batch=b, workers=1, rate=float(b)) for b in (1, 10, 100)]
    (group,) = groups(rows)
    assert group.axis == "batch"


def _row(cell, *, rate=None, **fields):
    usual = {
        "architecture": "ring",
        "model": "alexnet",
        "data": "synthetic",
        "batch": 32,
        "global_batch": 32 * fields.get("workers", 2),
        "workers": 2,
        "servers": 0,
        "engine": "tunnel",
    }
    speed = {"samples_per_second": estimate([rate])} if rate is not None else {}
    return Row(cell=cell, **{**usual, **fields, **speed})
