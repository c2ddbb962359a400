"""What `compare`, `demo` and `reproduce` share: progress, the table, the page at the end."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from paceline import engines, spec
from paceline.bench import compare, grid
from paceline.bench.table import Row, Table
from paceline.cli import console, training
from paceline.errors import SpecError, suggest
from paceline.units import format_bytes, format_seconds


@contextmanager
def progress(label: str) -> Iterator[compare.Watch]:
    """A bar of runs with the cell that runs and the time left; lines where there is no terminal."""
    if not console.err.is_terminal:
        yield lambda state: _line(label, state)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console.err, transient=True) as bar:
        task = bar.add_task(label, total=None, left="")

        def watch(state: compare.State) -> None:
            left = _left(state)
            description = state.now or label
            bar.update(
                task, total=state.total, completed=state.done, left=left, description=description
            )

        yield watch


def _line(label: str, state: compare.State) -> None:
    if state.now:
        left = _left(state)
        console.err.print(f"{label}: run {state.done + 1} of {state.total}, {state.now}  {left}")


def _left(state: compare.State) -> str:
    if state.seconds_left is None:
        return ""
    return f"about {format_seconds(state.seconds_left)} left" if state.seconds_left else ""


def check(comparison: spec.Comparison) -> None:
    """Find bad names before anything is written: every cell, resolved against the tables."""
    for cell in grid.cells(comparison):
        training.resolved(cell.experiment)
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
    """Run what is left of a comparison, print its table, and write its page."""
    output = console.print_member_line if verbose else _silent
    with progress("compare") as watch:
        table = compare.run(folder, pythons=pythons, output=output, watch=watch)
    show(table, folder.path, json=json)
    return table


def _silent(name: str, line: str) -> None:
    """Members of a grid print the same lines over and over; a failure shows its last ones."""


def show(table: Table, folder: Path, *, json: bool) -> None:
    """Print a comparison: JSON, or the table, the failures, the verdict, where it lies."""
    if json:
        console.print_json(table)
        return
    timed = [row for row in table.rows if row.samples_per_second is not None]
    if timed:
        for grid in rich_tables(timed):
            console.out.print(grid)
    for name, versions in {r.architecture: r.versions for r in timed if r.versions}.items():
        shown = ", ".join(f"{package} {version}" for package, version in versions.items())
        console.out.print(f"{name}: {shown}", markup=False)
    for row in table.rows:
        if row.failed is not None:
            console.out.print(f"[red]{row.cell}[/red]: ", end="")
            console.out.print(row.failed, markup=False)
    console.out.print(f"\n{table.verdict}", markup=False)
    console.out.print(f"recorded in {folder}")


Columns = dict[str, Callable[[Row], str]]
"""Heading -> how a row fills it."""

FACTORS: Columns = {
    "model": lambda row: row.model,
    "batch": lambda row: str(row.batch),
    "servers": lambda row: str(row.servers or ""),
    "engine": lambda row: row.engine,
    "network": lambda row: row.link or "",
    "device": lambda row: row.device or "",
    "container": lambda row: row.container or "",
}
"""What may differ between rows; shown only where it does."""

SPEED: Columns = {
    "samples/s": lambda row: _interval(row),
    "speed-up": lambda row: _number(row.speedup, "{:.2f}"),
    "efficiency": lambda row: _number(row.efficiency, "{:.0%}"),
    "step ± jitter": lambda row: _step(row),
    "loss": lambda row: _number(row.loss_last, "{:.4f}"),
    "trains like single": lambda row: _alike(row),
}
PARTS: Columns = {
    "input": lambda row: _phase(row, "input"),
    "forward": lambda row: _phase(row, "forward"),
    "backward": lambda row: _phase(row, "backward"),
    "exposed exchange": lambda row: _seconds(row.exchange_exposed_seconds),
    "wait": lambda row: _phase(row, "wait"),
    "update": lambda row: _phase(row, "update"),
}
MACHINE: Columns = {
    "cores busy": lambda row: _number(row.cpu_fraction, "{:.2f}"),
    "sent/step": lambda row: _bytes(row.bytes_per_step),
    "packets/step": lambda row: _number(row.packets_per_step, "{:.0f}"),
    "memory": lambda row: _bytes(row.max_rss_bytes),
    "epoch": lambda row: _seconds(row.epoch_seconds),
}
TABLES = {"speed": SPEED, "where a step's time goes": PARTS, "what it takes": MACHINE}
"""Three tables that fit a terminal in place of one that does not."""


def rich_tables(rows: list[Row]) -> Iterator[RichTable]:
    """The rows, in tables of the columns that have something to say."""
    differ = {name: text for name, text in FACTORS.items() if len({text(row) for row in rows}) > 1}
    names: Columns = {
        "architecture": lambda row: row.architecture,
        "workers": lambda row: str(row.workers),
        **differ,
    }
    for title, columns in TABLES.items():
        filled = {name: text for name, text in columns.items() if any(text(row) for row in rows)}
        if not filled:
            continue
        grid = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in names:
            words = name in ("architecture", "model", "engine", "network", "device", "container")
            grid.add_column(name, justify="left" if words else "right")
        for name in filled:
            grid.add_column(name, justify="right")
        for row in rows:
            grid.add_row(*(text(row) for text in (*names.values(), *filled.values())))
        yield grid


def _interval(row: Row) -> str:
    rate = row.samples_per_second
    if rate is None:
        return ""
    spread = f" [{rate.low:.0f}-{rate.high:.0f}]" if row.repeats > 1 else ""
    return f"{rate.median:.0f}" + spread.replace("[", "\\[")


def _step(row: Row) -> str:
    if row.step_seconds is None or row.jitter_seconds is None:
        return ""
    return f"{format_seconds(row.step_seconds)} ± {format_seconds(row.jitter_seconds)}"


def _alike(row: Row) -> str:
    if row.trains_like_single is None:
        return ""
    return "yes" if row.trains_like_single else f"no ({row.loss_difference:.1%} off)"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _bytes(value: float | None) -> str:
    return "" if value is None else format_bytes(value)


def _phase(row: Row, phase: str) -> str:
    parts = row.breakdown_seconds or {}
    return format_seconds(parts[phase]) if parts.get(phase) else ""
