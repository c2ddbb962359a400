"""What all user-written structures share: frozen, keyword-only, unknown keys refused."""

import msgspec

from paceline.errors import SpecError


class Spec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base of all a user may write. Quantities stay strings as written; properties give numbers."""


def require(condition: bool, where: str, problem: str, fix: str) -> None:
    """Raise SpecError unless `condition` holds."""
    if not condition:
        raise SpecError(where, problem, fix)
