"""One self-contained page: verdict, charts, table, question. Needs no network and no server."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import vl_convert

from paceline import __version__
from paceline.bench.table import Row, Table
from paceline.explain import Explanation
from paceline.explain.words import gain_text
from paceline.record import RunFolder
from paceline.report import charts, columns, members, steps
from paceline.report.charts import Chart
from paceline.report.rows import ChartRows, groups, labels, run_of
from paceline.report.verdicts import explained, with_verdict
from paceline.units import format_bytes, format_seconds

SNIPPET = "window.vegaEmbed = vegaEmbed;"
"""All that the page needs of the bundle."""

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(kw_only=True)
class Section:
    """Charts under a heading."""

    title: str
    charts: list[Chart] = field(default_factory=list)


@dataclass(kw_only=True)
class RunSection(Section):
    """One run in detail."""

    path: str
    steps: list[Chart] = field(default_factory=list)
    """Charts of single steps; `charts` are over time."""

    explanation: Explanation | None
    experiment: str
    notes: list[str]


@dataclass(kw_only=True)
class Page:
    """All that a page shows, and the numbers its charts draw from."""

    title: str
    verdict: str
    tiles: list[tuple[str, str, str]]
    """Heading, figure with unit, remark."""

    search: list[Section] = field(default_factory=list)
    scaling: list[Section] = field(default_factory=list)
    breakdown: list[Section] = field(default_factory=list)
    training: list[Section] = field(default_factory=list)
    runs: list[RunSection] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    cells: list[list[str]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    question: str = ""
    machine: list[tuple[str, str]] = field(default_factory=list)
    datasets: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def charts(self) -> list[Chart]:
        sections = [*self.search, *self.scaling, *self.breakdown, *self.training, *self.runs]
        over_time = [chart for section in sections for chart in section.charts]
        return over_time + [chart for run in self.runs for chart in run.steps]


def compose(table: Table, question: str = "") -> Page:
    """Gather what a page about `table` shows."""
    explanations = explained(table)
    table = with_verdict(table, explanations)
    runs = {row.cell: run for row in table.rows if row.failed is None and (run := run_of(row))}
    page = Page(title=table.name, verdict=table.verdict, tiles=_tiles(table.rows))
    for group in groups(table.rows):
        _add_group(page, group, runs, _limits(group, explanations))
    names = labels(table.rows)
    for row in table.rows:
        if row.failed is not None:
            page.failures.append((names[row.cell], row.failed))
        elif row.cell in runs:
            _add_run(page, names[row.cell], runs[row.cell], explanations.get(row.cell))
    page.headings, page.cells = columns.table(table.rows)
    page.question = question
    first = next(iter(runs.values()), None)
    if first is not None:
        page.machine = _machine(first)
    return page


def render(page: Page) -> str:
    """The page as one HTML text."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    environment.filters |= {"seconds": format_seconds, "slug": slug, "gain": gain_text}
    drawn = page.charts()
    data = {
        "charts": {chart.name: {"data": chart.data, "spec": _on_page(chart)} for chart in drawn},
        "datasets": page.datasets,
        "themes": {"light": charts.theme(dark=False), "dark": charts.theme(dark=True)},
    }
    return environment.get_template("page.html").render(
        page=page,
        colours=charts.PHASE_COLOURS,
        data=msgspec.json.encode(data).decode().replace("</", "<\\/"),
        vega=_vega().replace("</script", "<\\/script") if drawn else "",
        version=__version__,
    )


def _on_page(chart: Chart) -> dict[str, Any]:
    """The chart without a legend where the page has one for all charts of the kind."""
    if not chart.data.startswith(("breakdown/", "timeline/", "workers/")):
        return chart.spec
    encoding = chart.spec["encoding"]
    colour = encoding["color"] | {"legend": None}
    return chart.spec | {"encoding": encoding | {"color": colour}}


def slug(text: str) -> str:
    """A name for a file: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "all"


def _limits(group: ChartRows, explanations: dict[str, Explanation]) -> dict[str, float]:
    """Cell -> samples/s of a step that is as short as its resources allow."""
    return {
        row.cell: row.global_batch / found.limit_seconds
        for row in group.rows
        if row.global_batch is not None
        and (found := explanations.get(row.cell)) is not None
        and found.limit_seconds > 0
    }


def _add_group(
    page: Page, group: ChartRows, runs: dict[str, RunFolder], limits: dict[str, float]
) -> None:
    name, title = slug(group.title), group.title
    page.datasets[f"scaling/{name}"] = charts.scaling_values(group, limits)
    scaling = charts.scaling(group, f"scaling/{name}")
    if scaling:
        page.scaling.append(Section(title=title, charts=scaling))
    parts = charts.breakdown_values(group)
    if parts and len(runs) > 1:  # one run alone is shown worker by worker
        page.datasets[f"breakdown/{name}"] = parts
        page.breakdown.append(Section(title=title, charts=[charts.breakdown(f"breakdown/{name}")]))
    names = labels(group.rows)
    found = [members.losses(runs[r.cell], names[r.cell]) for r in group.rows if r.cell in runs]
    values = [value for own in found for value in own]
    if values:
        page.datasets[f"loss/{name}"] = values
        page.training.append(
            Section(title=title, charts=charts.losses(f"loss/{name}", list(names.values())))
        )


def _add_run(page: Page, label: str, run: RunFolder, explanation: Explanation | None) -> None:
    name = slug(label)
    section = RunSection(
        title=label,
        path=str(run.path),
        explanation=explanation,
        experiment=(run.path / "experiment.toml").read_text(encoding="utf-8"),
        notes=[event.text for event in run.events()],
    )
    _add_steps(page, section, run, name)
    values = members.throughput(run)
    if values:
        page.datasets[f"rate/{name}"] = values
        section.charts.append(charts.throughput_over_time(f"rate/{name}"))
    values = members.series(run)
    if values:
        present = {key for value in values for key in value}
        page.datasets[f"series/{name}"] = values
        own = [member.name for member in run.members()]
        section.charts += charts.series(
            f"series/{name}", sorted(present), own, members.capacities(run)
        )
    values = members.staleness(run)
    if values:
        page.datasets[f"staleness/{name}"] = values
        section.charts.append(charts.staleness(f"staleness/{name}"))
    page.runs.append(section)


def _add_steps(page: Page, section: RunSection, run: RunFolder, name: str) -> None:
    """Charts of single steps, where the run wrote any."""
    told = steps.told(run)
    if not told:
        return
    number, values = steps.timeline_values(run, told)
    page.datasets[f"timeline/{name}"] = values
    page.datasets[f"workers/{name}"] = steps.member_values(told)
    page.datasets[f"steps/{name}"] = steps.distribution_values(told)
    section.steps += [
        steps.timeline(f"timeline/{name}", number),
        steps.by_member(f"workers/{name}"),
        steps.distribution(f"steps/{name}"),
    ]


def _tiles(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    timed = [row for row in rows if row.samples_per_second is not None]
    if not timed:
        return []
    best = max(
        timed, key=lambda row: row.samples_per_second.median if row.samples_per_second else 0
    )
    assert best.samples_per_second is not None
    names = labels(timed)
    of_best = names[best.cell] if len(timed) > 1 else ""
    if not of_best and best.samples_per_second_with_pauses is not None:
        of_best = f"{best.samples_per_second_with_pauses:,.0f} with pauses"
    tiles = [("Throughput", f"{best.samples_per_second.median:,.0f} samples/s", of_best)]
    if best.step_seconds is not None:
        jitter = "" if best.jitter_seconds is None else f"± {format_seconds(best.jitter_seconds)}"
        tiles.append(("Step", format_seconds(best.step_seconds), jitter))
    scaled = [row for row in timed if row.efficiency is not None and row.workers > 1]
    if scaled:
        top = max(scaled, key=lambda row: row.speedup or 0)
        remark = f"{top.efficiency:.0%} of ideal, {names[top.cell]}"
        tiles.append(("Speed-up", f"{top.speedup:.2f}×", remark))
    if len(timed) == 1 and best.bytes_per_step:
        tiles.append(("Sent", format_bytes(best.bytes_per_step), "per step, all members"))
    if best.loss_first is not None and best.loss_last is not None and len(timed) == 1:
        tiles.append(("Loss", f"{best.loss_last:.3f}", f"from {best.loss_first:.3f}"))
    if len(timed) > 1:
        failed = len(rows) - len(timed)
        how = "Predicted" if all(row.engine == "predict" for row in timed) else "Measured"
        tiles.append((how, f"{len(timed)} rows", f"{failed} failed" if failed else ""))
    return tiles


def _machine(run: RunFolder) -> list[tuple[str, str]]:
    found = run.machine()
    packages = found.pop("packages", {})
    memory = found.pop("memory_bytes", None)
    lines = [(key, str(value)) for key, value in found.items()]
    if isinstance(memory, int):
        lines.append(("memory", format_bytes(memory)))
    if isinstance(packages, dict):
        lines += [(name, str(version)) for name, version in packages.items()]
    return lines


@cache
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script; bundling takes seconds, so it is kept."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = home / "paceline" / f"vega-{metadata.version('vl-convert-python')}.js"
    try:
        return kept.read_text(encoding="utf-8")
    except OSError:
        script: str = vl_convert.javascript_bundle(SNIPPET)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(script, encoding="utf-8")
        partial.replace(kept)
    except OSError:  # a read-only home: bundle again next time
        pass
    return script
