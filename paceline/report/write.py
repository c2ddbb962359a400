"""Write a report: the page, every chart as SVG and PNG, every number as CSV."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline import spec
from paceline.bench.table import Row, Table
from paceline.record import PHASES, RunFolder
from paceline.report import charts, figure, page, search
from paceline.report.charts import Chart
from paceline.report.drawing import Drawing, draw_all
from paceline.report.rows import from_runs
from paceline.search.folder import SearchFolder

FILE_WIDTH = 640


def write(
    table: Table,
    target: Path,
    *,
    question: str = "",
    paper: spec.Paper | None = None,
    files: bool = True,
) -> Path:
    """Write the report of a comparison into the folder `target`; returns its index.html.

    `question` is the text of the comparison's file; every run shows its own experiment anyway.
    `paper`: the comparison is a paper's, and the page opens with its figure.
    """
    composed = page.compose(table, question)
    if paper is not None:
        figure.add_figure(composed, paper, table)
    index = _write_page(composed, target, files=files)
    write_csv(table, target / "csv")
    return index


def write_network(
    curves: dict[str, Any], paper: spec.Paper, target: Path, *, question: str = ""
) -> Path:
    """Write the report of a paper's figure of networks; `curves`: link -> pairs of `net`."""
    composed = page.Page(title=figure.title(paper), verdict=" ".join(paper.differs), tiles=[])
    composed.question = question
    figure.add_network(composed, paper, curves)
    return _write_page(composed, target, files=True)


def write_runs(runs: Sequence[RunFolder], target: Path, *, files: bool = True) -> Path:
    """Write the report of runs that belong to no comparison."""
    return write(from_runs(runs), target, files=files)


def write_search(folder: SearchFolder, importances: Mapping[str, float]) -> Path:
    """Write the page of a search into its folder; return its index.html."""
    return _write_page(search.compose(folder, importances), folder.path / "report", files=True)


def _write_page(composed: page.Page, target: Path, *, files: bool) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    index = target / "index.html"
    index.write_text(page.render(composed), encoding="utf-8")
    if files:
        write_pictures(composed.charts(), composed.datasets, target / "charts")
    return index


def write_pictures(
    drawn: Sequence[Chart], datasets: dict[str, list[dict[str, Any]]], folder: Path
) -> None:
    """Each chart as SVG and PNG, on white, with its title."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**charts.theme(dark=False), "background": "white", "padding": 16}
    draw_all(
        [
            Drawing(
                path=str(folder.absolute() / chart.name),
                spec=chart.spec
                | {
                    "datasets": {chart.data: datasets[chart.data]} | chart.spec.get("datasets", {}),
                    "title": chart.title,
                    "width": FILE_WIDTH,
                    "config": config,
                },
            )
            for chart in drawn
        ]
    )


def write_csv(table: Table, folder: Path) -> None:
    """`table.csv` has a line per row; `steps.csv` and `series.csv` one per step and per sample."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "table.csv", [_flat(row) for row in table.rows])
    runs = [(row.cell, RunFolder(Path(path))) for row in table.rows for path in row.runs]
    steps, series = [], []
    for cell, run in runs:
        for member in run.members():
            head = {"row": cell, "run": str(run.path), "member": member.name}
            for step in run.steps(member.name):
                parts = {f"{p}_seconds": step.breakdown_seconds.get(p) for p in PHASES}
                plain = {
                    k: v for k, v in msgspec.to_builtins(step).items() if k != "breakdown_seconds"
                }
                steps.append(head | plain | parts)
            series += [head | msgspec.to_builtins(s) for s in run.series(member.name)]
    _write(folder / "steps.csv", steps)
    _write(folder / "series.csv", series)


def _flat(row: Row) -> dict[str, object]:
    """A row with its nested figures as columns of their own."""
    flat: dict[str, object] = {}
    for key, value in msgspec.to_builtins(row).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        elif not isinstance(value, list):
            flat[key] = value
    return flat


def _write(path: Path, lines: Sequence[dict[str, object]]) -> None:
    headings = list(dict.fromkeys(key for line in lines for key in line))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, headings, restval="")
        writer.writeheader()
        writer.writerows(lines)
