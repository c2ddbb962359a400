"""Settings of a user's own code that a search chooses: `paceline.setting("hidden", 128)`."""

import json
import os
from functools import cache
from pathlib import Path
from typing import TypeVar

VARIABLE = "PACELINE_SETTINGS"
"""The file with the settings of this trial; each name that is asked for is noted next to it."""

ASKED_SUFFIX = ".asked"

V = TypeVar("V", int, float, str, bool)


def setting(name: str, default: V) -> V:
    """Return the value that a search chose for `name`, or `default` outside a search.

    The value has the type of `default`: a default of 1.0 asks for a number with a fraction.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return default
    _note(path, name)
    chosen = _settings(path)
    return type(default)(chosen[name]) if name in chosen else default


@cache
def _settings(path: str) -> dict[str, int | float | str | bool]:
    found: dict[str, int | float | str | bool] = json.loads(Path(path).read_text(encoding="utf-8"))
    return found


@cache
def _note(path: str, name: str) -> None:
    """Leave word that `name` was asked for, so that the search can name settings nobody uses."""
    with open(path + ASKED_SUFFIX, "a", encoding="utf-8") as file:
        file.write(name + "\n")
