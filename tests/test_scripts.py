"""Any script: trains as it would alone, or is refused with the fix; never wrong in silence.

`tests/scripts` holds one script per pattern. Alone means without Paceline: a stand-in that does
nothing takes its place. What is expected of a script stands in its `EXPECTED`, a dictionary from
patterns of architectures to one of

    equal           every worker's result is the plain script's
    alike           every worker has the same result
    runs            it ends, with finite numbers: the mode promises no more
    refused: WORDS  a PacelineError whose sentence has these words

and what it leaves out is in `EXPECTED` below.
"""

import ast
import fnmatch
import json
import math
import os
import re
import runpy
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline import spec
from paceline.errors import MemberError
from paceline.record import RunFolder
from paceline.testing import run_members

FOLDER = Path(__file__).parent / "scripts"
SCRIPTS = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("__init__", "toy"))
EXPECTED = {
    "server*mode=*": "runs",
    "average*": "runs",
    "*": "equal",
}
TOLERANCE = 1e-4
REFUSAL = re.compile(r"^ *paceline\.errors\.(\w+): (.*)", re.MULTILINE | re.DOTALL)


class Place(NamedTuple):
    """Where a script runs."""

    architecture: str
    workers: int = 2
    servers: int = 0

    def __str__(self) -> str:
        servers = f"-{self.servers}servers" if self.servers else ""
        return f"{self.architecture}-{self.workers}workers{servers}"


RING, COLOCATED = Place("ring"), Place("server:placement=colocated")
DEDICATED = Place("server", servers=1)
ASYNC = Place("server:mode=async", servers=1)
AVERAGE = Place("average:every=1")
EVERYWHERE = (RING, COLOCATED)
"""Every script runs on these; on AVERAGE too where it is as good as alone."""

IN_TURN = (
    (DEDICATED, Place("server:placement=colocated,transport=tcp"), Place("hybrid")),
    (ASYNC, Place("average:every=4"), Place("server:mode=bounded,placement=colocated")),
)
"""Of each of these a script runs on one, chosen by its name; on all of them with `slow`."""

FOUR_WORKERS = (Place("ring", 4), Place("server:placement=colocated", 4), Place("server", 4, 2))
QUORUM = Place("server:mode=quorum,quorum=1", servers=1)
ROWS = {
    *("calls_forward", "calls_encode", "training_step", "scales_gradients", "ema_by_hand"),
    *("averaged_model", "clamps_weights", "weight_surgery", "unfreezes_later", "adds_group"),
    *("temperature", "keeps_own_model", "functional_forward", "no_sync_backward"),
    *("gan_module_list", "evaluates", "ends_early", "skips_alone"),
}
"""These were wrong in silence once: they run everywhere, always."""


def places(script: str) -> list[Any]:
    number = zlib.crc32(script.encode())
    first, second = (group[number % len(group)] for group in IN_TURN)
    chosen = {*EVERYWHERE, first}
    if expected(script, second) != "runs" or number % 4 == 0:
        chosen.add(second)
    every = [*EVERYWHERE, AVERAGE, *IN_TURN[0], *IN_TURN[1], *FOUR_WORKERS, QUORUM]
    if number % 8 == 0:
        chosen.add(FOUR_WORKERS[number // 8 % len(FOUR_WORKERS)])
    if expected(script, AVERAGE) != "runs":
        chosen.add(AVERAGE)
    if script in ROWS:
        chosen.update(IN_TURN[0], IN_TURN[1])
    return [
        pytest.param(script, place, id=f"{script}-{place}", marks=_marks(place in chosen, script))
        for place in every
    ]


def _marks(is_chosen: bool, script: str) -> list[Any]:
    return [] if is_chosen and not script.startswith("compiles") else [pytest.mark.slow]


@cache
def declared(script: str) -> dict[str, str]:
    """The script's own `EXPECTED`, without running it."""
    for node in ast.parse((FOLDER / f"{script}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPECTED":
            return dict(ast.literal_eval(node.value))
    return {}


def expected(script: str, place: Place) -> str:
    """The most exact pattern counts, the script's own before ours."""
    for table in (declared(script), EXPECTED):
        for pattern in sorted(table, key=len, reverse=True):
            if fnmatch.fnmatch(place.architecture, pattern):
                return table[pattern]
    raise AssertionError(f"nothing is expected of {script} on {place}")


@pytest.fixture(scope="session")
def alone() -> dict[str, dict[str, list[float]]]:
    """The results of all scripts as plain PyTorch, from one process without Paceline."""
    paths = [str(FOLDER / f"{script}.py") for script in SCRIPTS]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "alone" / "run.py"), *paths],
        env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1])},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    results: dict[str, dict[str, list[float]]] = json.loads(done.stdout)
    return results


def run_script(_session: Any, path: str) -> Any:
    return runpy.run_path(path)["result"]


def run(script: str, place: Place, path: Path) -> list[dict[str, list[float]]]:
    """Recorded there, as a user's run is: what looks on must not change what it sees."""
    architecture, program = spec.parse_architecture(place.architecture), FOLDER / f"{script}.py"
    experiment = spec.Experiment(
        architecture=architecture,
        workload=spec.Workload(script=spec.Script(path=str(program))),
        cluster=spec.Cluster(workers=place.workers, servers=place.servers),
    )
    return run_members(
        run_script,
        str(program),
        workers=place.workers,
        servers=place.servers,
        architecture=architecture,
        timeout_seconds=100,
        folder=RunFolder.create(path, experiment),
    )


@pytest.mark.parametrize(("script", "place"), [p for script in SCRIPTS for p in places(script)])
def test_a_script_trains_as_alone_or_is_refused(script, place, alone, tmp_path):
    outcome, folder = expected(script, place), tmp_path / "run"
    if outcome.startswith("refused: "):
        check_refusal(script, place, outcome.removeprefix("refused: "), folder)
        return
    results = run(script, place, folder)
    if outcome == "equal":
        for rank, result in enumerate(results):
            check_equal(result, alone[script], f"worker {rank}, alone")
    elif outcome == "alike":
        for rank, result in enumerate(results[1:], start=1):
            check_equal(result, results[0], f"worker {rank}, worker 0")
    else:
        assert outcome == "runs"
        assert all(math.isfinite(v) for r in results for values in r.values() for v in values)


def check_refusal(script: str, place: Place, words: str, folder: Path) -> None:
    with pytest.raises(MemberError) as caught:
        run(script, place, folder)
    match = REFUSAL.search(str(caught.value))
    assert match is not None, f"not refused by a sentence of ours:\n{caught.value}"
    assert match[1] != "DeadlineError", match[2]
    assert words in match[2], match[2]


def check_equal(given: dict[str, list[float]], wanted: dict[str, list[float]], who: str) -> None:
    assert given.keys() == wanted.keys()
    for name, values in wanted.items():
        if given[name] or not values:  # some numbers are known to worker 0 only
            close = pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE)
            assert given[name] == close, f"{name}: {who}"


def test_every_row_is_a_script():
    assert set(SCRIPTS) >= ROWS
