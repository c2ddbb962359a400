"""One verdict for each row, made once beside the row's baseline: page, terminal and JSON agree."""

import msgspec

from paceline.bench.table import Row, Table, verdict
from paceline.errors import RecordError
from paceline.explain import Explanation, explain
from paceline.report.rows import run_of


def explained(table: Table) -> dict[str, Explanation]:
    """Cell -> the explanation of the run that stands for it; strangers' runs have none."""
    runs = {row.cell: run for row in table.rows if row.failed is None and (run := run_of(row))}
    found = {}
    for row in table.rows:
        if row.cell not in runs:
            continue
        baseline = runs.get(row.baseline or "")
        try:
            found[row.cell] = explain(runs[row.cell], baseline)
        except RecordError:  # it ended before its first step, or a peer did not tell
            continue
    return found


def with_verdict(table: Table, found: dict[str, Explanation]) -> Table:
    """The table with each row's verdict in it, and the headline's last line: what limits it.

    One run alone, or one beside its baseline, is its own headline.
    """
    rows = [
        msgspec.structs.replace(row, verdict=found[row.cell].verdict if row.cell in found else None)
        for row in table.rows
    ]
    timed = [row for row in rows if row.failed is None]
    subject = _subject(timed, found)
    if subject is None:
        return msgspec.structs.replace(table, rows=rows)
    own = found[subject.cell]
    if len(timed) == 1 or (len(timed) == 2 and subject.baseline):
        return msgspec.structs.replace(table, rows=rows, verdict=own.verdict)
    cause = own.causes[0].text if own.causes else "nothing to mend"
    line = f"What limits {_short(subject)}: {cause}."
    best = next((action for action in own.actions if action.gain is not None), None)
    if best is not None and own.causes and own.causes[0].seconds:
        line += f" Next: {best.text}."
    return msgspec.structs.replace(table, rows=rows, verdict=f"{verdict(rows)}\n{line}")


def _subject(rows: list[Row], found: dict[str, Explanation]) -> Row | None:
    """Whom the headline is about: who failed to learn, else the fastest on the most workers."""
    ours = [r for r in rows if r.cell in found and r.samples_per_second is not None and not r.peer]
    if not ours:
        return next((row for row in rows if row.cell in found), None)
    sick = [r for r in ours if found[r.cell].causes and not found[r.cell].causes[0].seconds]
    most = max(row.workers for row in ours)
    many = sick or [row for row in ours if row.workers == most]
    return max(many, key=lambda r: r.samples_per_second.median if r.samples_per_second else 0.0)


def _short(row: Row) -> str:
    workers = f"{row.workers} worker{'s' if row.workers > 1 else ''}"
    return f"{row.name or row.architecture} on {workers}"
