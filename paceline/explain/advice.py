"""What to do about what was found: at most three actions, the most gain for the least effort first.

Every gain comes from `needs`, compared with the limit that would come next. A change that would not
help is not offered.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import msgspec

from paceline.explain.causes import RULES
from paceline.explain.causes.spells import as_in_other_steps
from paceline.explain.changes import WORTH_GAIN
from paceline.explain.evidence import Evidence, Loss
from paceline.explain.findings import Action, CauseName
from paceline.explain.needs import NOISE, SPREAD

MOST_ACTIONS = 3

SHARDED = ("fsdp", "fsdp2")
"""Observed jobs whose ranks hold parts of the weights: no other architecture does."""

EFFORT = {"flag": 1.0, "script": 2.0, "money": 4.0}
"""A flag of the same command costs least, then a change of the script, then hardware."""


def actions(evidence: Evidence, causes: Sequence[Loss]) -> list[Action]:
    """Return what to do; first about what is worse than time lost, where that comes first."""
    worse = list(takewhile(lambda cause: not cause.seconds, causes))
    before = [action for cause in worse for action in _against(evidence, cause.name)]
    found = [action for cause in causes for action in _against(evidence, cause.name)]
    unique = {action.text: action for action in found}.values()
    worth = [action for action in unique if _is_worth(action) and action not in before]
    if evidence.facts.summary.architecture in SHARDED:
        worth = [action for action in worth if "architecture" not in action.change]
    first = [*before, *sorted(worth, key=_gain_per_effort, reverse=True)][:MOST_ACTIONS]
    return [_with_flags(action) for action in first]


def _against(evidence: Evidence, cause: CauseName) -> Iterable[Action]:
    inside = [one for one in evidence.inside if one.loss.name == cause]
    if inside:
        return [as_in_other_steps(evidence, one) for one in inside]
    return RULES[cause].advice(evidence)


def _is_worth(action: Action) -> bool:
    """Whether it surely helps by what is known, two runs' noise aside; ranges reach further."""
    promised = action.gain
    if promised is None:
        return True
    surely = math.log1p(promised.low) + SPREAD - NOISE > 0
    return surely and promised.middle >= WORTH_GAIN


def _gain_per_effort(action: Action) -> float:
    if action.gain is None:
        return 0.0
    return math.log1p(action.gain.middle) / EFFORT[action.effort]


def _with_flags(action: Action) -> Action:
    """Name the flags of the command line that do it, where there are such."""
    added = flags(action.change)
    return msgspec.structs.replace(action, text=f"{action.text} ({added})") if added else action


def flags(change: Mapping[str, object]) -> str:
    """Return the flags of `paceline train` or `run` that make a change; empty where none do."""
    if not change or not all(isinstance(value, str | int) for value in change.values()):
        return ""
    shown = {name: value for name, value in change.items() if value != 0}
    if set(shown) - {"architecture", "servers", "batch", "link", "checkpoint_every"}:
        return ""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in shown.items())
