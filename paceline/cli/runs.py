"""Run folders as arguments: what `explain`, `report` and `watch` are given."""

from pathlib import Path

from paceline.errors import SpecError
from paceline.observe.finish import refresh
from paceline.observe.importing import holds_traces, import_folder
from paceline.record import RunFolder, open_folder


def open_run(path: Path) -> RunFolder:
    """The run at `path`; a sentence that says what was expected when it is none."""
    if not path.exists():
        raise SpecError(str(path), "there is no such folder.", _hint(path))
    if not (path / "run.json").is_file() and path.is_dir() and holds_traces(path):
        return import_folder(path)
    if not (path / "run.json").is_file():
        raise SpecError(str(path), "not a run folder: it has no run.json.", _hint(path))
    found = open_folder(path)
    refresh(found)
    return found


def _hint(path: Path) -> str:
    """The newest runs nearby, which is what the user most likely meant."""
    found = [run.parent for place in (path, Path("runs")) for run in place.glob("*/run.json")]
    newest = sorted(found, key=lambda run: -run.stat().st_mtime)[:3]
    if not newest:
        return "name a folder that `paceline train --out` or `run --out` made."
    return f"name a run, such as {', '.join(map(str, newest))}."
