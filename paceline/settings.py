"""Settings of a user's own code, chosen outside it: `paceline.setting("hidden", 128)`.

An experiment holds them in its table `[settings]`, and a search tries several values. The launcher
hands them to every member in an environment variable.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from paceline.errors import SpecError

Value = int | float | str | bool

VARIABLE = "PACELINE_SETTINGS"
"""The settings as one JSON object."""

ASKED_VARIABLE = "PACELINE_SETTINGS_ASKED"
"""A file that takes the name of every setting that is asked for; a search finds misspelt ones."""

V = TypeVar("V", int, float, str, bool)


def setting(name: str, default: V) -> V:
    """Return the value chosen for `name` outside the script, or `default`.

    The value has the type of `default`: a default of 1.0 asks for a number with a fraction.
    """
    _note(os.environ.get(ASKED_VARIABLE, ""), name)
    chosen: dict[str, Value] = json.loads(os.environ.get(VARIABLE, "{}"))
    if name not in chosen:
        return default
    value, kind = chosen[name], type(default)
    if kind in (int, float) and not isinstance(value, str) and kind(value) == value:
        return kind(value)
    if type(value) is not kind:
        problem = f"{value!r} was chosen, and the default {default!r} asks for {kind.__name__}."
        raise SpecError(f"setting {name}", problem, "choose a value of the default's type.")
    return value


def export(settings: Mapping[str, Value]) -> None:
    """Hand settings to the members that this process starts next."""
    if settings:
        os.environ[VARIABLE] = json.dumps(dict(settings))
    else:
        os.environ.pop(VARIABLE, None)


@cache
def _note(path: str, name: str) -> None:
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(name + "\n")
