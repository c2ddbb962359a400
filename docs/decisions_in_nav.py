"""Puts every page of docs/decisions and pages nobody listed into the site's navigation."""

from pathlib import Path
from typing import Any


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
