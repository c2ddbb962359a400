"""What mkdocs calls: every page is in the navigation, and links out of docs/ become plain words.

A page may point at a file of the repository, which a reader there can open and the site has not.
"""

import re
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def _listed(nav: list[Any]) -> set[str]:
    found: set[str] = set()
    for entry in nav:
        values = entry.values() if isinstance(entry, dict) else [entry]
        for value in values:
            found |= {value} if isinstance(value, str) else _listed(value)
    return found


def on_config(config: Any) -> Any:
    """Called by mkdocs when the configuration is read."""
    docs = Path(config["docs_dir"])
    decisions = sorted(f"decisions/{page.name}" for page in (docs / "decisions").glob("*.md"))
    listed = _listed(config["nav"])
    more = sorted(page.name for page in docs.glob("*.md") if page.name not in listed)
    config["nav"] += [{"More": more}] if more else []
    config["nav"].append({"Decisions": decisions})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page of docs/."""
    top = "/" not in page.file.src_uri
    return OUTSIDE.sub(r"\1", markdown) if top else markdown
