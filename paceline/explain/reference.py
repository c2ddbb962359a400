"""The table of causes in docs/explain.md, written from the causes' own objects.

`python -m paceline.explain.reference docs/explain.md` writes it anew; a test compares the two.
"""

import sys
from pathlib import Path

from paceline.explain.causes import FAMILIES

BEGIN = "<!-- The table below is written by `python -m paceline.explain.reference`. -->"
END = "<!-- The table ends here. -->"


def table() -> str:
    """Return every cause with what it means and what proves it, by family."""
    lines = ["| name | what it means | what proves it |", "|---|---|---|"]
    for family in FAMILIES:
        lines += [f"| `{rule.name}` | {rule.title} | {rule.proof} |" for rule in family.CAUSES]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return the page with the table between its two marks written anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
