"""Puts what a benchmark prints into a page of the docs, so that no figure there is typed by hand.

put(Path("docs/predict.md"), "pairs", text)      between <!-- pairs --> and <!-- /pairs -->
"""

from pathlib import Path


def put(page: Path, name: str, text: str) -> None:
    """Replace what stands between the two marks called `name`."""
    first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, found, rest = page.read_text(encoding="utf-8").partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise SystemExit(f"{page} has no {first.strip()} … {last.strip()} to write between.")
    page.write_text(f"{before}{first}\n{text.strip()}\n\n{last}{after}", encoding="utf-8")
