"""One page, one verdict; rows that can be told apart; bytes that can be compared."""

import math
import re

import msgspec
import pytest

from paceline import report
from paceline.explain import explain
from paceline.record import Sample, summarise
from paceline.report import charts, columns, members
from paceline.report.page import compose
from paceline.report.rows import groups, labels
from paceline.report.verdicts import explained, with_verdict
from tests.support.synthetic import MB, Times, synchronous_run


@pytest.fixture
def scaled(tmp_path):
    """Four workers whose compute takes three times what one worker's does."""
    single = synchronous_run(tmp_path / "single-1", workers=1, architecture="single")
    slow = Times(forward=0.030, backward=0.054)
    runs = [synchronous_run(tmp_path / f"ring-{n}", workers=n, times=slow) for n in (2, 4)]
    return [single, *runs]


def test_the_headline_is_the_verdict_of_the_row_it_is_about(scaled):
    table = report.from_runs(scaled)
    page = compose(table)
    own = {run.title: run.explanation for run in page.runs}
    (fastest,) = [found for title, found in own.items() if "4 workers" in title]
    assert fastest.verdict == explain(scaled[2], scaled[0]).verdict
    assert fastest.causes[0].name == "compute"
    assert fastest.causes[0].text in page.verdict
    assert page.verdict.count(fastest.causes[0].text) == 1


def test_a_verdict_is_said_once_however_often_it_is_added(scaled):
    table = report.from_runs(scaled)
    found = explained(table)
    once = with_verdict(table, found)
    assert with_verdict(once, found).verdict == once.verdict


def test_a_headline_has_at_most_three_lines(scaled):
    table = report.from_runs(scaled)
    assert len(with_verdict(table, explained(table)).verdict.splitlines()) <= 3


def test_rows_of_runs_have_their_names(tmp_path):
    runs = [synchronous_run(tmp_path / name) for name in ("monday", "tuesday", "wednesday")]
    table = report.from_runs(runs)
    headings, cells = columns.table(table.rows)
    assert [row[headings.index("run")] for row in cells] == ["monday", "tuesday", "wednesday"]
    assert len(set(labels(table.rows).values())) == 3
    fastest, second = re.findall(r"(\w+day) \(ring on 2 workers\)", table.verdict)
    assert fastest != second


def test_a_sick_run_is_the_headline_however_fast_the_others_are(tmp_path):
    fine = [synchronous_run(tmp_path / f"fine-{n}", workers=n) for n in (2, 4)]
    sick = synchronous_run(tmp_path / "sick", losses=lambda s: math.nan if s > 9 else 2.3)
    page = compose(report.from_runs([*fine, sick]))
    assert "What limits sick" in page.verdict
    assert "not a number from step 10" in page.verdict
    headings, cells = columns.table(report.from_runs([*fine, sick]).rows)
    assert cells[-1][headings.index("loss")] == "none from step 10"


def test_the_first_distribution_of_weights_is_no_steps(tmp_path):
    """500 MB before the first measured step, 4 MB in each step after it."""
    run = synchronous_run(tmp_path / "run", steps=200, exchange_bytes=4 * MB, jitter=0)
    for name in ("worker0", "worker1"):
        series = run.series(name)
        measured = run.steps(name)[5].start_seconds
        first = Sample(time_seconds=measured, cpu_fraction=1.0, bytes_sent=500 * MB)
        first.bytes_received, first.packets_sent, first.packets_received = 500 * MB, 1, 1
        lines = [first, *(s for s in series if s.time_seconds > measured)]
        content = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        (run.path / "members" / f"{name}.series.jsonl").write_bytes(content)
    summary = summarise(run, "finished")
    assert summary.bytes_per_step == pytest.approx(2 * 4 * MB, rel=0.2)


def test_gradients_in_memory_are_counted_and_said_to_be(tmp_path):
    counters = {f"worker{n}": {"summed_bytes": 40 * 7 * MB} for n in range(2)}
    run = synchronous_run(
        tmp_path / "run",
        architecture="server:placement=colocated",
        exchange_bytes=226,
        counters=counters,
    )
    for member in run.members():
        member.host = "here"
        run.write_member(member)
    summarise(run, "finished")
    (row,) = report.from_runs([run]).rows
    assert columns.FIGURES["sent per step"](row) == "14 MB in memory"


def test_throughput_has_no_dips_that_were_not_there(tmp_path):
    run = synchronous_run(tmp_path / "run", steps=100, jitter=0)
    rates = [value["rate"] for value in members.throughput(run)]
    assert min(rates) == pytest.approx(max(rates), rel=0.1)


def test_throughput_dips_where_a_worker_paused(tmp_path):
    run = synchronous_run(
        tmp_path / "run", steps=100, pause=lambda worker, step: 1.0 if step == 50 else 0.0
    )
    rates = [value["rate"] for value in members.throughput(run)]
    assert min(rates) < 0.2 * max(rates)


def test_the_slowest_run_has_the_longest_bar(tmp_path):
    """Checkpoints in every second step: its steps alone are the shorter ones."""
    paused = synchronous_run(tmp_path / "paused", pause=lambda w, step: 0.1 if step % 2 else 0.0)
    plain = synchronous_run(tmp_path / "plain", times=Times(forward=0.020))
    (group,) = groups(report.from_runs([paused, plain]).rows)
    bars = {}
    for value in charts.breakdown_values(group):
        bars[value["label"]] = bars.get(value["label"], 0.0) + value["ms"]
    lengths = {label.partition(" ")[0]: length for label, length in bars.items()}
    assert lengths["paused"] == pytest.approx(32 + 50, rel=0.1)
    assert lengths["paused"] > lengths["plain"]


def test_with_pauses_has_a_column_where_there_were_any(tmp_path):
    def pause(worker, step):
        return 0.05 if step % 2 else 0.0

    paused = synchronous_run(tmp_path / "paused", pause=pause)
    (row,) = report.from_runs([paused]).rows
    assert row.samples_per_second_with_pauses < 0.7 * row.samples_per_second.median
    headings, _ = columns.table([row])
    assert "with pauses" in headings
    (row,) = report.from_runs([synchronous_run(tmp_path / "plain")]).rows
    assert row.samples_per_second_with_pauses is None
