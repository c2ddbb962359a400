"""The page of verdicts that were judged: at first sight, and after `explain` was mended."""

from typing import Any

from gains import rounds

PAGE = """# How often verdicts are right

For readers who want to know how far to trust `paceline explain`. First sight is what counts: a
situation that `explain` was never mended with, whose cause was written down before the verdict was
looked at.

## At first sight

| round | situations | right | half | wrong | silent | innocent called healthy | gains in range |
|---|---|---|---|---|---|---|---|
{first}

A round is a set of situations that nobody had seen before; what was wrong in it was mended, and
became tests. No round has been judged since the last mending, so the figures of today's version at
first sight are not known. Ranges of gains are as wide as the gains of these rounds ask for, each
kind of situation left out in turn (`python benchmarks/gains.py`).

## Situations that were mended afterwards

Every row is a run with a cause planted in it (`tests/explain/situations`): a device at half speed,
a cable at a quarter of the others' rate, a script that sleeps. `explain` read the record and knew
nothing else. Where its first advice can be followed, it was, and the gain was measured against the
range that was promised. {note} These figures say that nothing was forgotten; they are no estimate
for other runs.

{checks}

| planted | the verdict names | promised | measured | |
|---|---|---|---|---|
{rows}

Where nothing stands after the name, nothing is planted: it must be called healthy. Where no gain
stands, the advice cannot be followed by a change of the experiment ("end what else runs here").

To run it again: `python benchmarks/explain.py --keep runs/laboratory --minutes 7`; this page is
written by `--recorded --page docs/laboratory.md`. The records are kept in `tests/explain/recorded`,
and a test judges them with every change of `explain`.
"""


def page(result: dict[str, Any], note: str) -> str:
    """The scoreboard for the docs."""
    lines = []
    for row in result["rows"]:
        gain = measured = ""
        if "measured" in row:
            low, high = row["claimed"]
            gain, measured = f"{low:+.0%} to {high:+.0%}", f"{row['measured']:+.0%}"
            measured += "" if row["inside"] else ", outside"
        named = ", ".join(row["named"]) or "healthy"
        cells = (f"{row['situation']}: {row['planted']}", named, gain, measured)
        lines.append(f"| {' | '.join(cells)} | {'' if row['right'] else 'wrong'} |")
    found = [f"- {c['name']}: {c['value']:.0%} (aim {c['target']:.0%})" for c in result["checks"]]
    shown = {"checks": "\n".join(found), "rows": "\n".join(lines), "note": note}
    first = "\n".join(_round(number, own) for number, own in enumerate(rounds(), 1))
    return PAGE.format(first=first, **shown).strip() + "\n"


def _round(number: int, own: dict[str, Any]) -> str:
    """One round as a row of the table."""
    inside = own["gains_inside"]
    cells = [
        number,
        own["situations"],
        f"{own['right']} ({own['right'] / own['situations']:.0%})",
        *(own[what] for what in ("half_right", "wrong", "silent")),
        f"{own['innocent_called_healthy']} of {own['innocent']}",
        f"{inside} of {inside + len(own['outside'])}",
    ]
    return f"| {' | '.join(map(str, cells))} |"
