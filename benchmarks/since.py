"""A benchmark before and after: this tree as it was at a revision and as it is now, in turn.

    python benchmarks/since.py ed86a6d exchange -- --sizes 1 --workers 2 --only server-shm
    python benchmarks/since.py ed86a6d tunnel --rounds 2 -- --compute 0.9 --repeats 1

What stands behind `--` are options of the benchmark.

Both are run with this Python, each with its own tree, in a temporary checkout. Rows are matched by
what names them; a ratio is the median of the rounds' own, and more than 1 is slower now. The ratio
of the best rounds stands beside it: what disturbs a round only ever adds to it. A check holds where
no median is above the most that is allowed (`--most`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("exchange", "setting", "contender", "name", "workers", "size_mb", "compute_seconds")
"""Fields that say what was measured."""
MEASURES = ("seconds", "cpu_seconds", "memory_bytes")

Row = dict[str, Any]
Key = tuple[tuple[str, Any], ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision")
    parser.add_argument("benchmark", choices=("exchange", "training", "tunnel"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=float, default=1.03)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    words = [*sys.argv[1:], "--"]
    given = parser.parse_args(words[: words.index("--")])
    options = words[words.index("--") + 1 : -1]
    with tempfile.TemporaryDirectory(prefix="paceline-since-") as folder:
        before = Path(folder) / "before"
        git("worktree", "add", "--detach", str(before), given.revision)
        try:
            rounds = measure(before, given, options)
        finally:
            git("worktree", "remove", "--force", str(before))
    rows = compare(rounds)
    result = {"rows": rows, "checks": [check(row, given.most) for row in rows]}
    print(json.dumps(result) if given.json else table(rows))


def git(*words: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *words], check=True, stdout=subprocess.DEVNULL)


def measure(
    before: Path, given: argparse.Namespace, options: list[str]
) -> list[tuple[list[Row], list[Row]]]:
    """The rows of both trees, round by round; who goes first changes."""
    rounds = []
    for number in range(given.rounds):
        trees = [before, ROOT] if number % 2 == 0 else [ROOT, before]
        rows = {tree: run(tree, given.benchmark, options) for tree in trees}
        rounds.append((rows[before], rows[ROOT]))
        print(f"round {number + 1} of {given.rounds} is done", file=sys.stderr)
    return rounds


def run(tree: Path, benchmark: str, options: list[str]) -> list[Row]:
    command = [sys.executable, str(tree / "benchmarks" / f"{benchmark}.py"), "--json", *options]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"since: {benchmark}.py {' '.join(options)} failed in {tree}")
    rows: list[Row] = json.loads(done.stdout)["rows"]
    return rows


def compare(rounds: list[tuple[list[Row], list[Row]]]) -> list[Row]:
    """What both trees have rows for, with the median of each, and of the rounds' ratios."""
    pairs: dict[tuple[Key, str], list[tuple[float, float]]] = defaultdict(list)
    for before, after in rounds:
        one, other = by_name(before), by_name(after)
        for key in one.keys() & other.keys():
            pairs[key].append((one[key], other[key]))
    return [
        {
            **dict(key),
            "measure": measure,
            "before": statistics.median(b for b, _ in found),
            "after": statistics.median(a for _, a in found),
            "ratio": statistics.median(a / b for b, a in found),
            "ratios": [a / b for b, a in found],
            "best": min(a for _, a in found) / min(b for b, _ in found),
        }
        for (key, measure), found in sorted(pairs.items(), key=str)
    ]


def by_name(rows: list[Row]) -> dict[tuple[Key, str], float]:
    """Several rows of one name (launches) are one, by their median."""
    found: dict[tuple[Key, str], list[float]] = defaultdict(list)
    for row in rows:
        key = tuple((name, row[name]) for name in NAMES if name in row)
        for measure in MEASURES:
            if isinstance(row.get(measure), int | float):
                found[key, measure].append(float(row[measure]))
    return {key: statistics.median(values) for key, values in found.items()}


def check(row: Row, most: float) -> Row:
    name = " ".join(str(row[field]) for field in NAMES if field in row)
    told = {"name": f"{name}, {row['measure']} since", "value": row["ratio"], "target": most}
    return {**told, "holds": row["ratio"] <= most}


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        name = " ".join(str(row[field]) for field in NAMES if field in row)
        scale, unit = (1e-6, "MB") if row["measure"] == "memory_bytes" else (1e3, "ms")
        spread = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        lines.append(
            f"{name:34} {row['measure']:12} {scale * row['before']:10.3f} -> "
            f"{scale * row['after']:10.3f} {unit}  {row['ratio']:.3f}  "
            f"best {row['best']:.3f}  ({spread})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
