"""What all user-written structures share: frozen, keyword-only, unknown keys refused."""

from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import msgspec

from paceline.errors import SpecError


class Spec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base of all a user may write. Quantities stay strings as written; properties give numbers."""


LARGEST = 2**31 - 1
"""No count of anything a user may write is above it."""

LARGEST_QUANTITY = 1e15


def check_numbers(value: object, where: str) -> None:
    """Raise SpecError for a number in a structure that no quantity can be: infinite, not a number,
    or larger than anything that could be counted."""
    if not isinstance(value, msgspec.Struct):
        return
    for name in value.__struct_fields__:
        part = getattr(value, name)
        items = part if isinstance(part, tuple) else (part,)
        for item in items:
            check_numbers(item, where)
            if isinstance(item, float):
                problem = f"{name} = {item} is not a number that can be reckoned with."
                require(abs(item) <= LARGEST_QUANTITY, where, problem, "write a finite number.")
            elif isinstance(item, int) and name != "seed":
                problem = f"{name} = {item} is too large."
                require(abs(item) <= LARGEST, where, problem, f"write {LARGEST} or less.")


def written(value: object) -> str:
    """A value as a user writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def require(condition: bool, where: str, problem: str, fix: str) -> None:
    """Raise SpecError unless `condition` holds."""
    if not condition:
        raise SpecError(where, problem, fix)


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def expected(kind: Any) -> str:
    """What a field of this type takes, in words: "stop or continue", "a whole number"."""
    if get_origin(kind) is Literal:
        *others, last = map(str, get_args(kind))
        return f"{', '.join(others)} or {last}" if others else last
    if isinstance(kind, UnionType):
        return " or ".join(expected(one) for one in kind.__args__ if one is not NoneType)
    if get_origin(kind) is tuple:
        return f"a list, each of it {expected(get_args(kind)[0])}"
    return WORDS.get(kind, "a table")
