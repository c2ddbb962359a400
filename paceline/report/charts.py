"""Charts as Vega-Lite, made with Altair from plain rows. Colours of text and axes are the page's.

Every chart names its data set and takes the width it is given, so that a page may hold many charts
over one set, and a phone may show them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from paceline.bench.table import Row
from paceline.record import PHASES
from paceline.report.rows import AXES, ChartRows, labels

Values = list[dict[str, Any]]

SERIES_COLOURS = (
    "#4269d0", "#ff725c", "#3ca951", "#efb118", "#a463f2", "#6cc5b0", "#ff8ab7", "#9c6b4e",
    "#97bbf5", "#9498a0",
)  # fmt: skip
"""Told apart on white and on black, and by most colour-blind people."""

PHASE_COLOURS = {
    "forward": "#4269d0",
    "backward": "#7f9ce2",
    "update": "#b3c3ef",
    "input": "#a463f2",
    "exchange exposed": "#ff725c",
    "wait": "#efb118",
    "other": "#9498a0",
    "pauses": "#9c6b4e",
}
"""Work in blues; what is lost in warm colours."""

THROUGHPUT = "Throughput, and its limit (dashed or a grey tick)"

IDEAL_COLOUR = "#8a8f98"
HEIGHT = 240
NAME_HEIGHT = 38
"""Room for a name of two lines."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture: `name` is its file's, `data` the set it draws from."""

    name: str
    title: str
    data: str
    spec: dict[str, Any]


def scaling(group: ChartRows, data: str) -> list[Chart]:
    """Throughput, and speed-up and efficiency where one worker was measured too.

    One row alone has nothing to be drawn against.
    """
    if len(group.rows) == 1:
        return []
    found = [_throughput(group, data)]
    if group.has_lines and group.axis == "workers" and any(row.speedup for row in group.rows):
        found += [_speedup(group, data), _efficiency(group, data)]
    return found


def scaling_values(group: ChartRows, limits: Mapping[str, float] | None = None) -> Values:
    """One point per row; `limits`: cell -> samples/s that no run of it can exceed."""
    names, most = labels(group.rows), limits or {}
    return [
        {
            "series": group.series[row.cell],
            "label": names[row.cell],
            "x": getattr(row, group.axis),
            "rate": _round(row.samples_per_second.median),
            "low": _round(row.samples_per_second.low),
            "high": _round(row.samples_per_second.high),
            **({"limit": _round(most[row.cell])} if row.cell in most else {}),
            **({"speedup": _round(row.speedup)} if row.speedup is not None else {}),
            **({"efficiency": _round(row.efficiency)} if row.efficiency is not None else {}),
        }
        for row in group.rows
        if row.samples_per_second is not None
    ]


def _names() -> alt.Y:
    """Names of rows beside their bars on two lines, so that a phone has room for bars."""
    parts = "split(datum.label, ' · ')"
    lines = f"[{parts}[0], join(slice({parts}, 1), ' · ')]"
    axis = alt.Axis(labelExpr=lines, labelLimit=240, labelLineHeight=12, labelOffset=-6)
    return alt.Y("label:N", title=None, sort=None, axis=axis)


def _throughput(group: ChartRows, data: str) -> Chart:
    base = _chart(data)
    if not group.has_lines:
        chart = base.mark_bar(cornerRadiusEnd=2, size=18).encode(
            y=_names(),
            x=alt.X("rate:Q", title="samples/s", axis=alt.Axis(tickCount=8)),
            color=_colour(group).legend(None),  # each bar has its name
            tooltip=["label:N", _tip("rate", "samples/s", ",.1f")],
        )
        between = base.mark_rule(strokeWidth=2, opacity=0.7).encode(
            y=_names(), x="low:Q", x2="high:Q", tooltip=["low:Q", "high:Q"]
        )
        limit = base.mark_tick(color=IDEAL_COLOUR, thickness=2, size=22).encode(
            y=_names(), x="limit:Q", tooltip=[_tip("limit", "limit", ",.0f")]
        )
        layered = alt.layer(
            chart,
            between.transform_filter("datum.low < datum.high"),
            limit.transform_filter("isValid(datum.limit)"),
        ).properties(height=alt.Step(NAME_HEIGHT))
        return Chart(
            name=_named("throughput", data), title=THROUGHPUT, data=data, spec=_dict(layered)
        )
    x = _axis(group)
    lines = base.mark_line(point=True).encode(
        x=x,
        y=alt.Y("rate:Q", title="samples/s", scale=alt.Scale(zero=True)),
        color=_colour(group),
        tooltip=["label:N", _tip("rate", "samples/s", ",.1f")],
    )
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.6).encode(
        x=x, y="low:Q", y2="high:Q", color=_colour(group)
    )
    limit = base.mark_line(strokeDash=[3, 3], strokeWidth=1.2, opacity=0.8).encode(
        x=x, y="limit:Q", color=_colour(group), tooltip=["label:N", _tip("limit", "limit", ",.0f")]
    )
    limit = limit.transform_filter("isValid(datum.limit)")
    chart = alt.layer(limit, bars, lines).properties(height=HEIGHT)
    return Chart(name=_named("throughput", data), title=THROUGHPUT, data=data, spec=_dict(chart))


def _speedup(group: ChartRows, data: str) -> Chart:
    base, x = _chart(data), _axis(group)
    most = max(row.workers for row in group.rows)
    ends = alt.Data(values=[{"x": 1, "speedup": 1}, {"x": most, "speedup": most}])
    ideal = (
        alt.Chart(ends, width="container")
        .mark_line(strokeDash=[5, 4], color=IDEAL_COLOUR, strokeWidth=1.5)
        .encode(x=x, y="speedup:Q")
    )
    word = (
        alt.Chart(alt.Data(values=[{"x": most, "speedup": most, "text": "ideal"}]))
        .mark_text(align="right", dx=4, dy=-8, color=IDEAL_COLOUR)
        .encode(x=x, y="speedup:Q", text="text:N")
    )
    lines = base.mark_line(point=True).encode(
        x=x,
        y=alt.Y("speedup:Q", title="times one worker", scale=alt.Scale(zero=True)),
        color=_colour(group),
        tooltip=["label:N", _tip("speedup", "speed-up", ".2f")],
    )
    chart = alt.layer(ideal, word, lines.transform_filter("isValid(datum.speedup)"))
    chart = chart.properties(height=HEIGHT)
    return Chart(name=_named("speedup", data), title="Speed-up", data=data, spec=_dict(chart))


def _efficiency(group: ChartRows, data: str) -> Chart:
    lines = _chart(data).mark_line(point=True)
    chart = lines.encode(
        x=_axis(group),
        y=alt.Y(
            "efficiency:Q",
            title="speed-up ÷ workers",
            axis=alt.Axis(format="%"),
            scale=alt.Scale(domainMin=0),
        ),
        color=_colour(group),
        tooltip=["label:N", _tip("efficiency", "efficiency", ".0%")],
    )
    chart = chart.transform_filter("isValid(datum.efficiency)").properties(height=HEIGHT)
    return Chart(name=_named("efficiency", data), title="Efficiency", data=data, spec=_dict(chart))


def breakdown_values(group: ChartRows) -> Values:
    """Milliseconds per phase and row; what the phases leave of the step is "other".

    With the pauses between steps, so that the slowest run has the longest bar.
    """
    names, values = labels(group.rows), []
    for row in group.rows:
        if not row.breakdown_seconds:
            continue
        parts = {phase.replace("_", " "): row.breakdown_seconds.get(phase, 0.0) for phase in PHASES}
        if row.step_seconds is not None:
            parts["other"] = max(0.0, row.step_seconds - sum(parts.values()))
            parts["pauses"] = paused_seconds(row)
        values += [
            {"label": names[row.cell], "phase": phase, "ms": _round(1e3 * parts[phase]), "order": n}
            for n, phase in enumerate(PHASE_COLOURS)
            if parts.get(phase)
        ]
    return values


def paused_seconds(row: Row) -> float:
    """Per step: by how much longer steps were with the pauses before them."""
    overall, alone = row.samples_per_second_with_pauses, row.samples_per_second
    if overall is None or alone is None or row.step_seconds is None:
        return 0.0
    return row.step_seconds * max(0.0, alone.median / overall - 1)


def breakdown(data: str) -> Chart:
    chart = (
        _chart(data)
        .mark_bar(size=18)
        .encode(
            y=_names(),
            x=alt.X("ms:Q", title="ms per step", axis=alt.Axis(tickCount=8)),
            color=alt.Color(
                "phase:N",
                title=None,
                scale=alt.Scale(domain=list(PHASE_COLOURS), range=list(PHASE_COLOURS.values())),
                legend=alt.Legend(orient="top", columns=8, symbolType="square"),
            ),
            order="order:Q",
            tooltip=["label:N", "phase:N", _tip("ms", "ms per step", ",.2f")],
        )
        .properties(height=alt.Step(NAME_HEIGHT))
    )
    title = "Where a step's time goes"
    return Chart(name=_named("breakdown", data), title=title, data=data, spec=_dict(chart))


SECONDS = ("seconds", "seconds")


def losses(data: str, names: Sequence[str] = ()) -> list[Chart]:
    """Loss against step and against time: smoothed, over what it was step by step."""
    return [
        _loss(data, names, ("step", "step"), "Loss against step", "loss-step"),
        _loss(data, names, SECONDS, "Loss against time", "loss-time"),
    ]


def _loss(data: str, names: Sequence[str], x: tuple[str, str], title: str, name: str) -> Chart:
    colour = series_colour(names)
    place = alt.X(f"{x[0]}:Q", title=x[1])
    scale = alt.Scale(zero=False)
    dash = alt.StrokeDash("series:N", legend=None, sort=None)
    tips = ["series:N", _tip(*x, ",.4~g"), _tip("loss", "loss", ",.4~g")]
    raw = _chart(data).mark_line(strokeWidth=1, opacity=0.25, clip=True)
    raw = raw.encode(x=place, y=alt.Y("loss:Q", title="loss", scale=scale), color=colour)
    smooth = _chart(data).mark_line(strokeWidth=2, clip=True)
    # Runs that train alike lie on one another: their dashes let all of them be seen.
    smooth = smooth.encode(x=place, y="smooth:Q", color=colour, strokeDash=dash, tooltip=tips)
    chart = alt.layer(raw, smooth).properties(height=HEIGHT)
    return Chart(name=_named(name, data), title=title, data=data, spec=_dict(chart))


def throughput_over_time(data: str) -> Chart:
    return _line(data, ["all"], SECONDS, ("rate", "samples/s"), "Throughput", "rate")


SERIES = {
    "cpu": ("CPU", "cores busy"),
    "memory": ("Memory", "MB resident"),
    "sent": ("Bytes sent", "MB/s"),
    "received": ("Bytes received", "MB/s"),
    "packets_sent": ("Packets sent", "packets/s"),
    "packets_received": ("Packets received", "packets/s"),
}
"""Measure of a member's samples -> title and unit."""


def series(
    data: str,
    present: Sequence[str],
    names: Sequence[str] = (),
    capacities: Mapping[str, float] | None = None,
) -> list[Chart]:
    """Each measure over time, a line per member, and what there is of it at most."""
    return [
        _line(
            data,
            names,
            SECONDS,
            (measure, unit),
            title,
            measure.replace("_", "-"),
            (capacities or {}).get(measure),
        )
        for measure, (title, unit) in SERIES.items()
        if measure in present
    ]


def staleness(data: str) -> Chart:
    """How many updates old the weights were that a gradient was made from."""
    chart = (
        _chart(data)
        .mark_bar(cornerRadiusEnd=2)
        .encode(
            x=alt.X("staleness:O", title="updates behind", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("count:Q", title="gradients", stack=True),
            color=alt.Color("series:N", title=None, scale=alt.Scale(range=list(SERIES_COLOURS))),
            tooltip=["series:N", "staleness:O", "count:Q"],
        )
        .properties(height=HEIGHT)
    )
    return Chart(name=_named("staleness", data), title="Staleness", data=data, spec=_dict(chart))


def theme(dark: bool) -> Mapping[str, Any]:
    """Vega's configuration on a light or a dark ground."""
    ink, faint, line = (
        ("#e6e7ea", "#9aa0aa", "#2b2f37") if dark else ("#1d2129", "#69707d", "#e7e9ee")
    )
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "axis": {
            "labelColor": faint,
            "titleColor": faint,
            "titleFontWeight": "normal",
            "labelFontSize": 11,
            "titleFontSize": 11,
            "gridColor": line,
            "domainColor": line,
            "tickColor": line,
            "titlePadding": 8,
        },
        "axisX": {"grid": False},
        "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
        "legend": {
            "labelColor": ink,
            "titleColor": faint,
            "labelFontSize": 12,
            "orient": "top",
        },
        "title": {"color": ink, "fontSize": 13, "fontWeight": 600, "anchor": "start"},
        "text": {"color": ink},
        "rule": {"color": ink},
        "line": {"strokeWidth": 2},
        "point": {"size": 42, "filled": True},
    }


def _line(
    data: str,
    names: Sequence[str],
    x: tuple[str, str],
    y: tuple[str, str],
    title: str,
    name: str,
    capacity: float | None = None,
) -> Chart:
    """`x` and `y` are a field and its unit; `names` are the lines, where they are known."""
    chart: Any = (
        _chart(data)
        .mark_line(strokeWidth=1.6, interpolate="linear", clip=True)
        .encode(
            x=alt.X(f"{x[0]}:Q", title=x[1]),
            y=alt.Y(f"{y[0]}:Q", title=y[1], scale=alt.Scale(zero=True)),
            color=series_colour(names),
            tooltip=["series:N", _tip(*x, ",.4~g"), _tip(*y, ",.4~g")],
        )
    )
    if capacity is not None:
        ends = alt.Data(values=[{"most": capacity, "text": f"all there is: {capacity:g}"}])
        line = alt.Chart(ends, width="container")
        rule = line.mark_rule(strokeDash=[5, 4], color=IDEAL_COLOUR).encode(y="most:Q")
        word = line.mark_text(align="left", dx=4, dy=-7, color=IDEAL_COLOUR).encode(
            x=alt.value(0), y="most:Q", text="text:N"
        )
        chart = alt.layer(chart, rule, word)
    chart = chart.properties(height=HEIGHT)
    return Chart(name=_named(name, data), title=title, data=data, spec=_dict(chart))


def series_colour(names: Sequence[str]) -> alt.Color:
    return alt.Color(
        "series:N",
        title=None,
        sort=None,
        scale=alt.Scale(range=list(SERIES_COLOURS)),
        legend=None if len(names) == 1 else _legend(names),
    )


def _named(kind: str, data: str) -> str:
    """ "loss-time-vgg16" for a chart of "loss/vgg16"."""
    return f"{kind}-{data.partition('/')[2]}"


def _chart(data: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(name=data), width="container")


def _axis(group: ChartRows) -> alt.X:
    places = sorted({getattr(row, group.axis) for row in group.rows})
    axis = alt.Axis(values=places, format="d", labelAngle=0)
    return alt.X("x:Q", title=AXES[group.axis], axis=axis, scale=alt.Scale(nice=False, padding=12))


def _colour(group: ChartRows) -> alt.Color:
    names = list(dict.fromkeys(group.series.values()))
    return alt.Color(
        "series:N",
        title=None,
        scale=alt.Scale(domain=names, range=list(SERIES_COLOURS)),
        legend=_legend(names) if len(names) > 1 else None,
    )


def _legend(names: Sequence[str]) -> alt.Legend:
    """Above the chart, in as many columns as fit a phone."""
    longest = max(map(len, names), default=14)
    is_long = longest > 14 and len(names) <= 6
    columns = 4 if longest <= 8 else 3 if longest <= 11 else 1 if is_long else 2
    return alt.Legend(orient="top", columns=columns, labelLimit=260, symbolOpacity=1)


def _tip(field: str, title: str, form: str) -> alt.Tooltip:
    return alt.Tooltip(f"{field}:Q", title=title, format=form)


def _dict(chart: Any) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict()
    spec.pop("config", None)  # the page's own, light or dark
    return spec


def _round(value: float) -> float:
    """Four digits: what an eye can tell, and a third of the page's size."""
    return float(f"{value:.4g}")
