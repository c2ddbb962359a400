"""The page of a search: the best trial, how values improved, which settings matter, all trials."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from paceline import spec
from paceline.report.charts import HEIGHT, IDEAL_COLOUR, SERIES_COLOURS, Chart
from paceline.report.page import Page, Section
from paceline.search.folder import QUESTION, SearchFolder, TrialEntry
from paceline.search.running import settings_in_words
from paceline.spec.search import SETTING, Goal, Range, SearchQuestion, ValueList

STATES = ("complete", "pruned", "failed", "left out")
"""Trials that a chart tells apart; a trial that equals another is not drawn."""


def compose(folder: SearchFolder, importances: Mapping[str, float]) -> Page:
    """Gather what the page of a search shows."""
    question, entries = folder.question(), folder.entries()
    goal = spec.parse_goal(question.search.goal)
    best = folder.best(entries)
    page = Page(
        title=f"Search: {question.name}",
        verdict=conclusion(question, entries, best),
        tiles=_tiles(goal, entries, best),
    )
    charts = []
    if drawn := _history_values(entries, goal):
        page.datasets["search/history"] = drawn
        charts.append(_history(goal))
    if len(question.search.tried) > 1 and any(entry.value is not None for entry in entries):
        page.datasets["search/parallel"] = _parallel_values(question, entries, goal)
        charts.append(_parallel([*map(_short, question.search.tried), goal.title], goal))
    if importances:
        shares = [{"setting": _short(n), "share": round(s, 4)} for n, s in importances.items()]
        page.datasets["search/importance"] = shares
        charts.append(_importance())
    page.search = [Section(title="Trials", charts=charts)] if charts else []
    page.headings, page.cells = table(question, entries)
    page.question = (folder.path / QUESTION).read_text(encoding="utf-8")
    return page


def conclusion(
    question: SearchQuestion, entries: Sequence[TrialEntry], best: TrialEntry | None
) -> str:
    """Return in a sentence or two what a search found."""
    goal = spec.parse_goal(question.search.goal)
    counts = {state: sum(e.state == state for e in entries) for state in (*STATES, "same")}
    ran = sum(entry.was_run for entry in entries)
    done = f"{ran} trials were run, {counts['pruned']} of them ended early"
    done += f", {counts['failed']} failed." if counts["failed"] else "."
    if counts["left out"]:
        done += f" {counts['left out']} settings were not run because they cannot win."
    if best is None:
        return f"No trial has a value for the goal {goal}. {done}"
    return f"Best: {goal.title} {best.value:.4g} with {settings_in_words(best.settings)}. {done}"


def table(
    question: SearchQuestion, entries: Sequence[TrialEntry]
) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the table of trials, the best first."""
    goal = spec.parse_goal(question.search.goal)
    names = list(question.search.tried)
    sign = -1 if goal.maximizes else 1
    ordered = sorted(
        entries,
        key=lambda e: (
            e.value is None,
            sign * (e.value or 0.0),
            STATES.index(e.state) if e.state in STATES else 9,
        ),
    )
    headings = ["trial", *map(_short, names), goal.title, "predicted", "state", "steps", "why"]
    return headings, [
        [str(e.number), *(_shown(e.settings.get(n)) for n in names), *_figures(e)] for e in ordered
    ]


def _figures(entry: TrialEntry) -> list[str]:
    predicted = entry.predicted
    between = f"{predicted['low']:.4g} to {predicted['high']:.4g}" if predicted else ""
    return [_shown(entry.value), between, entry.state, str(entry.steps or ""), entry.reason]


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(name: str) -> str:
    return name.removeprefix(SETTING)


def _tiles(
    goal: Goal, entries: Sequence[TrialEntry], best: TrialEntry | None
) -> list[tuple[str, str, str]]:
    ran = [entry for entry in entries if entry.was_run]
    early = sum(entry.state == "pruned" for entry in ran)
    tiles = [("Trials", str(len(ran)), f"{early} ended early")]
    if best is not None:
        tiles.insert(0, (goal.title.capitalize(), _shown(best.value), f"trial {best.number}"))
    left_out = sum(entry.state == "left out" for entry in entries)
    if left_out:
        tiles.append(("Not run", str(left_out), "cannot win"))
    return tiles


def _history_values(entries: Sequence[TrialEntry], goal: Goal) -> list[dict[str, Any]]:
    """One point per trial with a value; `best` is the best value up to there."""
    choose, best, rows = (max if goal.maximizes else min), None, []
    for entry in entries:
        if entry.value is None or entry.state == "same":
            continue
        best = entry.value if best is None else choose(best, entry.value)
        text = settings_in_words(entry.settings)
        rows.append({"trial": entry.number, "value": entry.value, "best": best, "text": text})
    return rows


def _history(goal: Goal) -> Chart:
    base = alt.Chart(alt.NamedData(name="search/history"), width="container")
    x = alt.X("trial:Q", title="trial", axis=alt.Axis(format="d", tickMinStep=1))
    y = alt.Y("value:Q", title=goal.title, scale=alt.Scale(zero=False))
    line = base.mark_line(interpolate="step-after", color=IDEAL_COLOUR).encode(x=x, y="best:Q")
    points = base.mark_point(color=SERIES_COLOURS[0]).encode(
        x=x, y=y, tooltip=["trial:Q", alt.Tooltip("value:Q", format=".4~g"), "text:N"]
    )
    title = "Value of each trial; the line is the best so far"
    chart = alt.layer(line, points).properties(height=HEIGHT)
    return Chart(name="search-history", title=title, data="search/history", spec=_plain(chart))


def _parallel_values(
    question: SearchQuestion, entries: Sequence[TrialEntry], goal: Goal
) -> list[dict[str, Any]]:
    """Each trial's place on each axis, from 0 to 1, and the value written there."""
    complete = [entry for entry in entries if entry.value is not None and entry.state == "complete"]
    values = [entry.value or 0.0 for entry in complete]
    low, high = min(values, default=0.0), max(values, default=1.0)
    rows = []
    for entry in complete:
        quality = _place(entry.value or 0.0, low, high)
        for name, dimension in question.search.dimensions().items():
            value = entry.settings[name]
            place = _place_in(dimension, value)
            rows.append(_point(entry, _short(name), place, _shown(value), quality, goal))
        rows.append(_point(entry, goal.title, quality, _shown(entry.value), quality, goal))
    return rows


def _point(
    entry: TrialEntry, axis: str, place: float, shown: str, quality: float, goal: Goal
) -> dict[str, Any]:
    return {
        "trial": entry.number,
        "axis": axis,
        "place": round(place, 4),
        "shown": shown,
        "quality": round(quality if goal.maximizes else 1 - quality, 4),
    }


def _place(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _place_in(dimension: Range | ValueList, value: Any) -> float:
    """Return where a value lies on its axis: a range is drawn as it is sampled."""
    if isinstance(dimension, ValueList):
        return _place(dimension.values.index(value), 0, len(dimension.values) - 1)
    scale = math.log if dimension.log else float
    return _place(scale(value), scale(dimension.low), scale(dimension.high))


def _parallel(axes: Sequence[str], goal: Goal) -> Chart:
    base = alt.Chart(alt.NamedData(name="search/parallel"), width="container")
    x = alt.X("axis:N", sort=list(axes), title=None, axis=alt.Axis(labelAngle=0))
    y = alt.Y("place:Q", title=None, axis=None)
    colour = alt.Color(
        "quality:Q",
        title="better →",
        scale=alt.Scale(scheme="viridis", domain=[0, 1]),
        legend=alt.Legend(orient="top", tickCount=0, format=""),
    )
    lines = base.mark_line(opacity=0.7, strokeWidth=1.6).encode(
        x=x, y=y, detail="trial:N", color=colour, tooltip=["trial:N", "axis:N", "shown:N"]
    )
    title = "Each line is a trial; brighter is better"
    chart = lines.properties(height=HEIGHT)
    return Chart(name="search-parallel", title=title, data="search/parallel", spec=_plain(chart))


def _importance() -> Chart:
    base = alt.Chart(alt.NamedData(name="search/importance"), width="container")
    bars = base.mark_bar(color=SERIES_COLOURS[0], cornerRadiusEnd=2).encode(
        y=alt.Y("setting:N", sort="-x", title=None),
        x=alt.X("share:Q", title="share of the differences", axis=alt.Axis(format="%")),
        tooltip=["setting:N", alt.Tooltip("share:Q", format=".0%")],
    )
    title = "Which settings matter"
    chart = bars.properties(height=alt.Step(32))
    return Chart(
        name="search-importance", title=title, data="search/importance", spec=_plain(chart)
    )


def _plain(chart: Any) -> dict[str, Any]:
    found: dict[str, Any] = chart.to_dict()
    found.pop("config", None)  # the page's own, light or dark
    return found
