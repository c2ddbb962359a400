"""Many runs, as `compare`, `demo` and `reproduce` show them: progress, the table, the page."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from paceline import engines, report, spec
from paceline.bench import compare, grid
from paceline.bench.peers import peer, runner
from paceline.bench.table import Row, Table
from paceline.cli import console, job
from paceline.cli.streams import MemberStreams
from paceline.errors import SpecError, suggest
from paceline.record import PHASES
from paceline.report import columns
from paceline.report.rows import labels
from paceline.report.verdicts import explained, with_verdict
from paceline.units import format_seconds

Text = Callable[[Row], str]
"""How a row fills a column."""


@contextmanager
def progress(label: str) -> Iterator[compare.Watch]:
    """A bar of runs with the cell that runs and the time left; lines where there is no terminal."""
    if not console.err.is_terminal:
        yield lambda state: _line(label, state)
        return
    parts = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*parts, console=console.err, transient=True) as bar:
        task = bar.add_task(label, total=None, left="")

        def watch(state: compare.ComparisonState) -> None:
            left = _left(state)
            description = state.now or label
            bar.update(
                task, total=state.total, completed=state.done, left=left, description=description
            )

        yield watch


def _line(label: str, state: compare.ComparisonState) -> None:
    if state.now:
        left = _left(state)
        console.err.print(f"{label}: run {state.done + 1} of {state.total}, {state.now}  {left}")


def _left(state: compare.ComparisonState) -> str:
    if state.seconds_left is None:
        return ""
    return f"about {format_seconds(state.seconds_left)} left" if state.seconds_left else ""


def check(comparison: spec.Comparison) -> None:
    """Find bad names before anything is written: every cell, resolved against the tables."""
    for cell in grid.cells(comparison):
        if cell.refused is not None:
            continue  # its row says why
        job.resolved(cell.experiment)
        if cell.peer:
            runner.adapt(cell.experiment, peer(cell.peer))
        if cell.experiment.engine not in engines.ENGINES:
            problem = f'"{cell.experiment.engine}" is not an engine of this version.'
            raise SpecError("--on", problem, suggest(cell.experiment.engine, engines.ENGINES))


def run(
    folder: compare.ComparisonFolder,
    pythons: Mapping[str, str],
    *,
    json: bool,
    verbose: bool = False,
    page: bool = True,
) -> Table:
    """Run what is left of a comparison, print its table, say what limited the fastest run."""
    output = MemberStreams(stdout=False, plain="") if verbose else _silent
    with progress(folder.comparison().name) as watch:
        table = compare.run(folder, pythons=pythons, output=output, watch=watch)
    table = with_verdict(table, explained(table))
    folder.write(table)
    show(table, folder.path, json=json)
    if page:
        show_page(folder, table)
    return table


def show_page(folder: compare.ComparisonFolder, table: Table) -> None:
    """The page of a comparison, beside its record."""
    console.err.print(f"page: {write_page(folder, table, folder.path / 'report')}")


def write_page(folder: compare.ComparisonFolder, table: Table, target: Path) -> Path:
    """The page of a comparison; a paper's opens with its figure, whoever writes it."""
    question, paper = folder.question(), folder.comparison().paper
    curves = folder.network()
    if curves is not None and paper is not None:
        return report.write_network(curves, paper, target, question=question)
    return report.write(table, target, question=question, paper=paper)


def _silent(member: str, stream: str, content: bytes) -> None:
    """Members of a grid print the same lines over and over; a failure shows its last ones."""


def show(table: Table, folder: Path, *, json: bool) -> None:
    """Print a comparison: JSON, or the table, the failures, the verdict, where it lies."""
    if json:
        console.print_json(table)
        return
    timed = [row for row in table.rows if row.samples_per_second is not None]
    if timed:
        for part in rich_tables(timed):
            console.out.print(part)
    for name, versions in {r.architecture: r.versions for r in timed if r.versions}.items():
        shown = ", ".join(f"{package} {version}" for package, version in versions.items())
        console.out.print(f"{name}: {shown}", markup=False)
    for row in table.rows:
        if row.failed is not None:
            console.out.print(f"[red]{row.cell}[/red]: ", end="")
            console.out.print(row.failed, markup=False)
    console.out.print(f"\n{table.verdict}", markup=False)
    console.out.print(f"recorded in {folder}")


NAME_WIDTH = 20
"""Columns of a terminal for the name of a row; the rest is for figures."""

MUCH_ROOM = 1000
"""More columns than any table has."""

SPEED = ("samples/s", "speed-up", "efficiency", "step", "loss", "trains like single")
MACHINE = ("CPU (cores)", "sent per step", "memory", "jitter", "epoch", "packets per step")


def rich_tables(rows: Sequence[Row]) -> Iterator[RichTable]:
    """Three tables that fit a terminal in place of one that does not."""
    yield _fitted("speed", rows, {name: columns.FIGURES[name] for name in SPEED})
    phases = {phase.replace("_", " "): partial(_phase, phase) for phase in PHASES}
    yield _fitted("where a step's time goes", rows, phases)
    yield _fitted("what it takes", rows, {name: columns.FIGURES[name] for name in MACHINE})


def _fitted(title: str, rows: Sequence[Row], figures: Mapping[str, Text]) -> RichTable:
    """A line per row under a name of its own, with as many of the figures as the terminal holds.

    Figures are listed by importance: what does not fit is left out from the end, never cut.
    """
    filled = {name: text for name, text in figures.items() if any(text(row) for row in rows)}
    while True:
        shown = _filled(title, rows, filled)
        room = console.out.options.update(max_width=MUCH_ROOM)  # else it would promise to shrink
        needed = Measurement.get(console.out, room, shown).maximum
        if needed <= console.out.width or len(filled) == 1:
            return shown
        filled.popitem()


def _filled(title: str, rows: Sequence[Row], figures: Mapping[str, Text]) -> RichTable:
    names = labels(rows)
    filled = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    filled.add_column("", no_wrap=True)  # folded already; figures give way, not its words
    for name in figures:  # folded headings, so that a terminal holds all figures
        filled.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        cells = (_folded(names[row.cell]), *(text(row) for text in figures.values()))
        filled.add_row(*(escape(cell) for cell in cells))
    return filled


def _folded(name: str) -> str:
    """A row's name on lines of its own words: an option is not broken in two."""
    return "\n".join(textwrap.wrap(name.replace(":", ": "), NAME_WIDTH, break_long_words=False))


def _phase(phase: str, row: Row) -> str:
    parts = row.breakdown_seconds or {}
    return format_seconds(parts[phase]) if parts.get(phase) else ""
