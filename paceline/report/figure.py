"""A paper's figure, redrawn from our own measurements, as the preset describes it."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from paceline import spec
from paceline.bench.table import Row, Table
from paceline.report import charts, members
from paceline.report.charts import Chart, Values
from paceline.report.page import Page, Section, slug
from paceline.report.rows import labels, run_of

MEASURES = {
    "samples_per_second": "samples/s",
    "speedup": "times one worker",
    "efficiency": "speed-up ÷ workers",
    "epoch_seconds": "seconds per epoch",
    "step_seconds": "seconds per step",
}
FACTORS = {
    "workers": "workers",
    "batch": "batch per worker",
    "global_batch": "samples a step",
    "servers": "servers",
}
SERIES = ("cpu", "packets_received", "packets_sent")
"""What P4 draws over time, one line per node."""

PREDICTED_SERIES = ("received", "sent")
"""Of these a prediction knows the bytes."""


def title(paper: spec.Paper) -> str:
    """What the page of a paper's experiment is called."""
    return f"{paper.paper}, Figure {paper.figure}: {paper.title}"


def add_figure(page: Page, paper: spec.Paper, table: Table) -> None:
    """Put the figure first on the page of its measurements; it says what differs from the paper."""
    page.title = title(paper)
    page.verdict += f"\nWhat differs from the paper: {' '.join(paper.differs)}"
    section = Section(title=f"Figure {paper.figure} of {paper.paper}, redrawn: {paper.title}")
    timed = [row for row in table.rows if row.samples_per_second is not None]
    if paper.kind == "series":
        _add_series(page, section, timed)
    elif paper.kind == "loss":
        _add_losses(page, section, timed)
    else:
        _add_grid(page, section, paper, timed)
    page.scaling.insert(0, section)


def add_network(page: Page, paper: spec.Paper, curves: dict[str, Any]) -> None:
    """Bandwidth against message size, a line for each network; `curves`: link -> pairs of `net`."""
    ways = {"bits_per_second": "one direction", "both_bits_per_second": "each of both"}
    page.datasets["figure/net"] = [
        {"bytes": row["bytes"], "rate": row[way] / 1e9, "series": f"{link}, {words}"}
        for link, pairs in curves.items()
        for pair in pairs
        for row in pair["rows"]
        for way, words in ways.items()
    ]
    chart = (
        _base("figure/net")
        .mark_line(point=True)
        .encode(
            x=alt.X("bytes:Q", title="message, bytes", scale=alt.Scale(type="log", base=2)),
            y=alt.Y("rate:Q", title="Gbit/s", scale=alt.Scale(type="log")),
            color=_colour(page.datasets["figure/net"]),
        )
        .properties(height=charts.HEIGHT)
    )
    drawn = Chart(
        name="figure-net",
        title="Bandwidth against message size",
        data="figure/net",
        spec=_dict(chart),
    )
    heading = f"Figure {paper.figure} of {paper.paper}, redrawn: {paper.title}"
    page.scaling.insert(0, Section(title=heading, charts=[drawn]))


def _add_grid(page: Page, section: Section, paper: spec.Paper, rows: Sequence[Row]) -> None:
    """One chart per measure and panel; bars where the x axis counts nothing."""
    panels = sorted({getattr(row, paper.panels) for row in rows}) if paper.panels else [None]
    for panel in panels:
        own = [r for r in rows if panel is None or getattr(r, paper.panels) == panel]
        name = slug("figure" if panel is None else f"figure {panel}")
        points = _points(paper, own)
        page.datasets[f"figure/{name}"] = points
        where = "" if panel is None else f", {FACTORS.get(paper.panels, paper.panels)} {panel}"
        for measure in paper.y:
            if any(measure in point for point in points):
                section.charts.append(_drawn(paper, measure, name, where, points))


def _points(paper: spec.Paper, rows: Sequence[Row]) -> Values:
    names = _line_names(paper, rows)
    taken = {(names[r.cell], getattr(r, paper.x)) for r in rows if r.architecture != "single"}
    points: Values = []
    for row in rows:
        x = getattr(row, paper.x)
        if row.architecture == "single" and (names[row.cell], x) in taken:
            continue  # the line has its own run at this place
        point = {"x": "bare" if x is None else x, "series": names[row.cell]}
        for measure in paper.y:
            value = getattr(row, measure)
            if measure == "samples_per_second" and value is not None:
                point |= {"low": value.low, "high": value.high}
                value = value.median
            if value is not None:
                point[measure] = value
        points.append(point)
    return points


def _line_names(paper: spec.Paper, rows: Sequence[Row]) -> dict[str, str]:
    """Cell -> its line; architectures are told apart where several share a value."""
    several = len({row.architecture for row in rows if row.architecture != "single"}) > 1
    names = {}
    for row in rows:
        value = getattr(row, paper.lines)
        unit = FACTORS.get(paper.lines, "")
        name = f"{value} {unit.removesuffix('s') if value == 1 else unit}".strip()
        if paper.lines != "architecture" and several and row.architecture != "single":
            name += f", {row.architecture}"
        names[row.cell] = "single" if paper.lines == "servers" and not value else name
    return names


def _drawn(paper: spec.Paper, measure: str, name: str, where: str, points: Values) -> Chart:
    data = f"figure/{name}"
    counts = paper.x in FACTORS
    x_title = FACTORS.get(paper.x, paper.x)
    places = sorted({point["x"] for point in points})
    x = alt.X("x:N", title=None, sort=None)
    if counts:
        axis, scale = (
            alt.Axis(values=places, format="d"),
            alt.Scale(nice=False, padding=12, zero=False),
        )
        x = alt.X("x:Q", title=x_title, axis=axis, scale=scale)
    y = alt.Y(f"{measure}:Q", title=MEASURES[measure], scale=alt.Scale(zero=True))
    tips = [
        "series:N",
        alt.Tooltip("x:Q" if counts else "x:N", title=x_title),
        alt.Tooltip(f"{measure}:Q", format=",.4~g"),
    ]
    base = _base(data)
    if counts:
        chart: Any = base.mark_line(point=True).encode(
            x=x, y=y, color=_colour(points), tooltip=tips
        )
        if measure == "samples_per_second":
            spread = base.mark_rule(opacity=0.6).encode(
                x=x, y="low:Q", y2="high:Q", color=_colour(points)
            )
            chart = alt.layer(spread, chart)
    else:
        chart = base.mark_bar().encode(
            x=x, xOffset="series:N", y=y, color=_colour(points), tooltip=tips
        )
    heading = f"{MEASURES[measure]} against {x_title}{where}"
    spec_dict = _dict(chart.properties(height=charts.HEIGHT))
    return Chart(name=f"{name}-{slug(measure)}", title=heading, data=data, spec=spec_dict)


def _add_series(page: Page, section: Section, rows: Sequence[Row]) -> None:
    names = labels(rows)
    for row in rows:
        run = run_of(row)
        values = members.series(run) if run is not None else []
        if values:
            data = f"figure/{slug(names[row.cell])}"
            page.datasets[data] = values
            known = [name for name in SERIES if any(name in value for value in values)]
            for chart in charts.series(data, known or PREDICTED_SERIES):
                section.charts.append(_retitled(chart, f"{chart.title}: {names[row.cell]}"))


def _add_losses(page: Page, section: Section, rows: Sequence[Row]) -> None:
    names = labels(rows)
    found = [(run_of(row), names[row.cell]) for row in rows]
    page.datasets["figure/loss"] = [
        value for run, name in found if run is not None for value in members.losses(run, name)
    ]
    drawn = charts.losses("figure/loss", list(names.values()))
    section.charts += [_retitled(chart, chart.title) for chart in drawn]


def _retitled(chart: Chart, title: str) -> Chart:
    """The same chart as a part of the figure: names of files stay apart."""
    return Chart(name=f"figure-{chart.name}", title=title, data=chart.data, spec=chart.spec)


def _base(data: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(name=data), width="container")


def _colour(points: Values) -> alt.Color:
    return charts.series_colour(list(dict.fromkeys(point["series"] for point in points)))


def _dict(chart: Any) -> dict[str, Any]:
    made: dict[str, Any] = chart.to_dict()
    made.pop("config", None)
    return made
