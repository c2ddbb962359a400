"""How wide the ranges of promised gains must be, from gains that were followed at first sight.

    python benchmarks/gains.py --json

A range is widened by one factor on both sides. Each kind of situation is left out in turn: the
factor is chosen from the others, so that four of five of them lie inside, and the one left out is
judged by it. The factor from all kinds is `needs.SPREAD`.
"""

import argparse
import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.explain.needs import NOISE, SPREAD

FIRST_SIGHT = Path(__file__).resolve().parent.parent / "tests/explain/first_sight.toml"
INSIDE_FRACTION = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    found = calibrated()
    print(json.dumps(found) if given.json else json.dumps(found, indent=1))


def calibrated() -> dict[str, Any]:
    """Each gain's distance from its range, and the share inside when its kind is left out."""
    rows = [
        {"kind": one["kind"], "outside_by": outside(one["low"], one["high"], one["measured"])}
        for own in rounds()
        for one in own["outside"]
    ]
    rows += [{"kind": f"inside {n}", "outside_by": 0.0} for n in range(_inside())]
    for row in rows:
        others = [other["outside_by"] for other in rows if other["kind"] != row["kind"]]
        row["inside"] = row["outside_by"] <= spread(others) + 1e-9
    needed = spread([row["outside_by"] for row in rows])
    share = sum(row["inside"] for row in rows) / len(rows)
    checks = [
        _check("gains inside, each kind left out", share, INSIDE_FRACTION),
        _check("spread in use", SPREAD, NOISE + needed),
    ]
    return {"rows": rows, "checks": checks}


def outside(low: float, high: float, measured: float) -> float:
    """By how much a measured gain lies outside its range, as a logarithm of throughput."""
    gained = math.log1p(measured)
    return max(0.0, math.log1p(low) - gained, gained - math.log1p(high))


def spread(distances: Sequence[float]) -> float:
    """The widening within which four of five gains lie, counting one that is not known yet."""
    ordered = sorted(distances)
    place = math.ceil(INSIDE_FRACTION * (len(ordered) + 1)) - 1
    return ordered[min(place, len(ordered) - 1)]


def rounds() -> list[dict[str, Any]]:
    """Every round of situations that were judged at first sight."""
    found: list[dict[str, Any]] = tomllib.loads(FIRST_SIGHT.read_text())["round"]
    return found


def _inside() -> int:
    return sum(own["gains_inside"] for own in rounds())


def _check(name: str, value: float, target: float) -> dict[str, object]:
    return {"name": name, "value": value, "target": target, "holds": value >= target - 1e-9}


if __name__ == "__main__":
    main()
