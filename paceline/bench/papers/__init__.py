"""The papers' experiments: one comparison file each beside this one, named as the user types it."""

from collections.abc import Sequence
from pathlib import Path

from paceline import spec
from paceline.errors import SpecError, suggest

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Every experiment, in the papers' order."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load(name: str) -> spec.Comparison:
    """The experiment of that name."""
    if name not in names():
        raise SpecError("reproduce", f'"{name}" is not an experiment.', suggest(name, names()))
    return spec.load_comparison(FOLDER / f"{name}.toml")


def load_all() -> list[spec.Comparison]:
    return [load(name) for name in names()]


def find(wanted: Sequence[str]) -> list[spec.Comparison]:
    """The experiments named; a beginning such as "p2" or "p1-fig10" stands for all that have it."""
    found: dict[str, spec.Comparison] = {}
    for name in wanted:
        matching = [known for known in names() if known.startswith(f"{name}-") or known == name]
        for known in matching or [name]:
            found.setdefault(known, load(known))
    return list(found.values())
