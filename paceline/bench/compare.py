"""Run a comparison: its cells, repeat after repeat, results written as they come.

    comparison.toml            the question
    cells.jsonl                one line per finished or failed run
    runs/<cell>/<repeat>/      the run folders
    table.json                 the rows, as far as they are known

A comparison that was broken off goes on where it stopped: what `cells.jsonl` says is done, is done.
"""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline import engines, spec
from paceline.bench import grid
from paceline.bench.grid import Cell
from paceline.bench.peers import peer
from paceline.bench.table import Table, tabulate
from paceline.errors import PacelineError, RecordError, SpecError
from paceline.launch import Output

QUESTION, OUTCOMES, RUNS, TABLE = "comparison.toml", "cells.jsonl", "runs", "table.json"
NETWORK = "net.json"
"""In the place of runs where a paper's figure is of networks: link -> pairs of `net`."""


class CellOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one run of one cell ended."""

    cell: str
    repeat: int
    seconds: float
    reason: str = ""
    """Why it failed; empty when it finished."""


class ComparisonState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a comparison is, for whoever shows it."""

    done: int
    total: int
    seconds_left: float | None
    now: str
    """The cell that runs."""


Watch = Callable[[ComparisonState], None]


class ComparisonFolder:
    """Paths, writing and reading of one comparison's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, comparison: spec.Comparison) -> "ComparisonFolder":
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            fix = "name a folder that does not exist yet, or go on with --resume."
            raise SpecError("--out", f"{path} exists.", fix)
        path.mkdir(parents=True, exist_ok=True)
        question = spec.comparison_to_toml(comparison)
        (path / QUESTION).write_text(question, encoding="utf-8")
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "ComparisonFolder":
        if not (path / QUESTION).is_file():
            raise RecordError(f"{path} is not a comparison: it has no {QUESTION}")
        return cls(path)

    def question(self) -> str:
        """The comparison's file as it is written."""
        return (self.path / QUESTION).read_text(encoding="utf-8")

    def comparison(self) -> spec.Comparison:
        return spec.load_comparison(self.path / QUESTION)

    def network(self) -> dict[str, Any] | None:
        """The curves of networks, where that is what was measured."""
        file = self.path / NETWORK
        found: dict[str, Any] = msgspec.json.decode(file.read_bytes()) if file.is_file() else {}
        return found or None

    def outcomes(self) -> list[CellOutcome]:
        file = self.path / OUTCOMES
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        return [msgspec.json.decode(line, type=CellOutcome) for line in lines]

    def add(self, outcome: CellOutcome) -> None:
        with (self.path / OUTCOMES).open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")

    def run_path(self, cell: Cell, repeat: int) -> Path:
        return self.path / RUNS / cell.key / str(repeat)

    def table(self) -> Table:
        """The rows from all that is there now."""
        comparison = self.comparison()
        finished: dict[str, list[Path]] = {}
        reasons: dict[str, str] = {}
        cells = {cell.key: cell for cell in grid.cells(comparison)}
        for outcome in self.outcomes():
            if outcome.reason:
                reasons[outcome.cell] = outcome.reason
            elif outcome.cell in cells:
                path = self.run_path(cells[outcome.cell], outcome.repeat)
                finished.setdefault(outcome.cell, []).append(path)
        return tabulate(comparison.name, list(cells.values()), finished, reasons)

    def write(self, table: Table) -> None:
        content = msgspec.json.format(msgspec.json.encode(table), indent=1)
        (self.path / TABLE).write_bytes(content)


def run(
    folder: ComparisonFolder,
    *,
    pythons: Mapping[str, str] | None = None,
    output: Output = lambda member, stream, content: None,
    watch: Watch = lambda state: None,
) -> Table:
    """Run what is not done yet; a failed cell is a row with its reason, and the rest goes on.

    `pythons` names another interpreter for a peer.
    """
    comparison = folder.comparison()
    cells = grid.cells(comparison)
    order = list(grid.schedule(cells, comparison.compare.repeats))
    before = folder.outcomes()
    done = {(o.cell, o.repeat): o for o in before if not o.reason}
    clock = _TimeLeft([o for o in before if not o.reason])
    failed: set[str] = set()
    for number, (repeat, cell) in enumerate(order):
        if (cell.key, repeat) in done or cell.key in failed:
            continue
        left = [c.key for r, c in order[number:] if (c.key, r) not in done and c.key not in failed]
        state = ComparisonState(
            done=number, total=len(order), seconds_left=clock.left(left), now=cell.key
        )
        watch(state)
        outcome = _run_cell(folder, cell, repeat, dict(pythons or {}), output)
        folder.add(outcome)
        if outcome.reason:
            failed.add(cell.key)
        else:
            clock.add(outcome)
        folder.write(folder.table())
    watch(ComparisonState(done=len(order), total=len(order), seconds_left=0.0, now=""))
    return folder.table()


def _run_cell(
    folder: ComparisonFolder, cell: Cell, repeat: int, pythons: dict[str, str], output: Output
) -> CellOutcome:
    path, began, reason = folder.run_path(cell, repeat), time.monotonic(), ""
    if path.exists():  # from a run that was broken off
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if cell.refused is not None:
            raise SpecError(*cell.refused)
        if cell.peer:
            from paceline.bench.peers import runner  # needs torch, which the rest does not

            python = pythons.get(cell.peer) or pythons.get("") or sys.executable
            runner.run(cell.experiment, peer(cell.peer), path, python=python, output=output)
        else:
            engines.run(cell.experiment, path, output=output)
    except PacelineError as error:
        reason = str(error)
    except Exception as error:  # one cell's bug must not cost the others
        reason = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    return CellOutcome(cell=cell.key, repeat=repeat, seconds=seconds, reason=reason)


class _TimeLeft:
    """A cell takes what it took before, or what the others took."""

    def __init__(self, outcomes: list[CellOutcome]) -> None:
        self._seconds = {outcome.cell: outcome.seconds for outcome in outcomes}

    def add(self, outcome: CellOutcome) -> None:
        self._seconds[outcome.cell] = outcome.seconds

    def left(self, cells: list[str]) -> float | None:
        if not self._seconds:
            return None
        usual = sum(self._seconds.values()) / len(self._seconds)
        return sum(self._seconds.get(cell, usual) for cell in cells)
