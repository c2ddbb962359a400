"""What a page shows: rows of a comparison, or the same rows made of single runs.

Groups are the rows that belong into one chart: the same model, batch and network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paceline.bench.grid import Cell
from paceline.bench.table import Row, Table, add_speedup, tabulate, verdict
from paceline.record import RunFolder

AXES = {"workers": "workers", "batch": "batch per worker", "servers": "servers"}


@dataclass(frozen=True, kw_only=True)
class ChartRows:
    """Rows of one chart: lines over `axis`, one line per name in `series`."""

    title: str
    axis: str
    rows: tuple[Row, ...]
    series: dict[str, str]
    """Cell -> the line it belongs to."""

    @property
    def has_lines(self) -> bool:
        """Whether any line has two points; bars show it better otherwise."""
        places = {(self.series[row.cell], getattr(row, self.axis)) for row in self.rows}
        return len(places) > len(set(self.series.values()))


def from_runs(runs: Sequence[RunFolder], name: str = "") -> Table:
    """Rows of runs that no comparison asked for; one worker's run is the others' baseline."""
    keys = _keys(runs)
    cells = [Cell(key=k, experiment=r.experiment()) for k, r in zip(keys, runs, strict=True)]
    finished = {k: [r.path] for k, r in zip(keys, runs, strict=True)}
    table = tabulate(name or _title(runs), cells, finished, {})
    alone = {_workload(row): row for row in table.rows if row.workers == 1 and not row.servers}
    for row in table.rows:
        row.name, row.baseline = row.cell, None
        add_speedup(row, alone.get(_workload(row)))
    table.verdict = verdict(table.rows)  # again: now rows have names, and speed-ups
    return table


def groups(rows: Sequence[Row]) -> list[ChartRows]:
    """The rows with figures, in charts."""
    timed = [row for row in rows if row.samples_per_second is not None]
    if not timed:
        return []
    axis = _axis(timed)
    several_servers = {r.architecture for r in timed if r.servers} if _varies(timed) else set()
    found: dict[tuple[str, ...], list[Row]] = {}
    split_total = len({r.global_batch for r in timed}) < len({r.batch for r in timed})
    for row in timed:
        batch = f"batch {row.global_batch} in all" if split_total else f"batch {row.batch}"
        batch = batch if row.batch else ""
        where = (row.link or "", _device(row), row.container or "")
        key = (row.subject, row.data or "", "" if axis == "batch" else batch, row.engine, *where)
        found.setdefault(key, []).append(row)
    return [
        ChartRows(
            title=_group_title(key, list(found)),
            axis=axis,
            rows=tuple(own),
            series={
                row.cell: _series(row, axis != "servers" and row.architecture in several_servers)
                for row in own
            },
        )
        for key, own in found.items()
    ]


def label(row: Row) -> str:
    """A row in a few words: "ring · 4 workers"."""
    words = [row.architecture, f"{row.workers} worker{'s' if row.workers != 1 else ''}"]
    if row.name:
        words.insert(0, row.name)
    if row.servers:
        words.append(f"{row.servers} server{'s' if row.servers != 1 else ''}")
    return " · ".join(words)


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """Cell -> a label that no other row has: factors that vary are added to the short one."""
    found = {row.cell: label(row) for row in rows}
    for factor in ("subject", "link", "device", "batch", "container", "cell"):
        if len(set(found.values())) == len(rows):
            break
        if len({getattr(row, factor) for row in rows}) > 1:
            for row in rows:
                value = getattr(row, factor)
                if value:
                    shown = f"batch {value}" if factor == "batch" else value
                    found[row.cell] += f" · {shown}"
    return found


def run_of(row: Row) -> RunFolder | None:
    """The run that stands for a row: of several repeats the one nearest the median."""
    runs = [RunFolder(Path(path)) for path in row.runs]
    if len(runs) < 3:
        return runs[0] if runs else None
    rates = [run.summary().samples_per_second for run in runs]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(runs):
        return runs[0]
    middle = median(known)
    return min(zip(known, runs, strict=True), key=lambda pair: abs(pair[0] - middle))[1]


def _keys(runs: Sequence[RunFolder]) -> list[str]:
    names = [run.path.resolve().name for run in runs]
    return [
        name if names.count(name) == 1 else f"{run.path.resolve().parent.name}/{name}"
        for name, run in zip(names, runs, strict=True)
    ]


def _title(runs: Sequence[RunFolder]) -> str:
    first = runs[0].summary()
    if len(runs) == 1:
        return f"{first.subject}, {first.architecture} on {first.workers} worker" + (
            "s" if first.workers != 1 else ""
        )
    models = {run.summary().subject for run in runs}
    return f"{len(runs)} runs of {models.pop() if len(models) == 1 else f'{len(models)} models'}"


def _workload(row: Row) -> tuple[object, ...]:
    return row.subject, row.data, row.engine, row.device


def _axis(rows: Sequence[Row]) -> str:
    """What the lines run over: workers where any architecture has several counts, else batch."""
    for axis in AXES:
        counts: dict[str, set[int]] = {}
        for row in rows:
            counts.setdefault(row.architecture, set()).add(getattr(row, axis))
        if any(len(values) > 1 for values in counts.values()):
            return axis
    return "workers"


def _varies(rows: Sequence[Row]) -> bool:
    counts: dict[str, set[int]] = {}
    for row in rows:
        counts.setdefault(row.architecture, set()).add(row.servers)
    return any(len(values) > 1 for values in counts.values())


def _series(row: Row, with_servers: bool) -> str:
    if not with_servers:
        return row.architecture
    return f"{row.architecture}, {row.servers} server{'s' if row.servers != 1 else ''}"


def _device(row: Row) -> str:
    return row.device if row.device and row.device != "cpu" else ""


def _group_title(key: tuple[str, ...], keys: list[tuple[str, ...]]) -> str:
    """The factors in which this group differs from others; the model and its batch when alone."""
    if len(keys) == 1:
        return " · ".join(part for part in (key[0], key[2], *key[4:]) if part)
    differing = [i for i in range(len(key)) if len({other[i] for other in keys}) > 1]
    return " · ".join(key[i] for i in differing if key[i]) or key[0]
