"""Any script: trains as it would alone, or is refused with the fix; never wrong in silence.

Alone means without Paceline: a stand-in that does nothing takes its place. `@script` says what is
expected of a script, by architecture:

    equal           every worker's result is the plain script's
    alike           every worker has the same result
    trains          after `settle` all workers have the same weights, which have moved about as
                    far from the start as the plain script's: the mode promises no more
    drifts          as far, but each worker ends with weights of its own: it takes other steps, or
                    updates some weights itself
    refused: WORDS  a PacelineError whose sentence has these words
"""

import fnmatch
import json
import math
import operator
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import paceline
from paceline import spec
from paceline.errors import MemberError
from paceline.record import RunFolder
from paceline.testing import run_members
from tests.scripts import harness
from tests.scripts.harness import PATTERNS, SCRIPTS, Values, numbers

FOLDER = Path(__file__).parent
USUAL = {"server*mode=*": "trains", "average*": "trains", "*": "equal"}
"""What `@script` leaves out."""

TOLERANCE = 1e-4
ALONE_SECONDS = 300.0
pytestmark = pytest.mark.timeout(ALONE_SECONDS + 60)
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
"""Every script runs on these."""

IN_TURN = (
    *(DEDICATED, Place("server:placement=colocated,transport=tcp"), Place("hybrid")),
    *(ASYNC, Place("average:every=4"), Place("server:mode=bounded,placement=colocated")),
    *(AVERAGE, Place("server:mode=quorum,quorum=1", servers=1)),
    *(Place("ring", 4), Place("server:placement=colocated", 4), Place("server", 4, 2)),
)
"""A script runs on one of these, chosen by its name; on all of them with `slow`."""

UPDATING = Place("server:placement=colocated,update=server")
"""Servers update, because the script asks for it: what it cannot do then is refused."""

ROWS = {
    *("calls_forward", "calls_encode", "training_step", "scales_gradients", "ema_by_hand"),
    *("averaged_model", "clamps_weights", "weight_surgery", "unfreezes_later", "adds_group"),
    *("temperature", "keeps_own_model", "functional_forward", "no_sync_backward"),
    *("gan_module_list", "evaluates", "ends_early", "skips_alone"),
}
"""These were wrong in silence once: they run everywhere, always."""


def places(script: str) -> list[Any]:
    number, every = zlib.crc32(script.encode()), [*EVERYWHERE, *IN_TURN]
    chosen = set(every) if script in ROWS else {*EVERYWHERE, IN_TURN[number % len(IN_TURN)]}
    if PATTERNS["updating"] in SCRIPTS[script].outcomes:
        every.append(UPDATING)
        chosen.add(UPDATING)
    return [
        pytest.param(script, place, id=f"{script}-{place}", marks=_marks(place in chosen, script))
        for place in every
    ]


def _marks(is_chosen: bool, script: str) -> list[Any]:
    return [] if is_chosen and not script.startswith("compiles") else [pytest.mark.slow]


def expected(script: str, place: Place) -> str:
    """The outcome of the most exact pattern, the script's own before the usual ones."""
    for table in (SCRIPTS[script].outcomes, USUAL):
        for pattern in sorted(table, key=len, reverse=True):
            if fnmatch.fnmatch(place.architecture, pattern):
                return table[pattern]
    raise AssertionError(f"nothing is expected of {script} on {place}")


@pytest.fixture(scope="session")
def alone(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """The results of scripts as plain PyTorch, from one process without Paceline."""
    here = [item for item in request.session.items if item.path == Path(__file__)]
    calls = [getattr(item, "callspec", None) for item in here]
    asked = {call.params["script"] for call in calls if call and "script" in call.params}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "alone" / "run.py"), *sorted(asked & SCRIPTS.keys())],
        env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1])},
        capture_output=True,
        text=True,
        check=True,
        timeout=ALONE_SECONDS,
    )
    results: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return results


def run_script(_session: Any, script: str, settles: bool) -> tuple[Values, list[float]]:
    """The script's values, and the weights after every step of every worker has arrived."""
    values, trained = harness.run(script)
    if settles:
        paceline.settle()
        paceline.barrier()
        paceline.settle()
    return values, numbers(trained)


def run(script: str, place: Place, path: Path) -> list[tuple[Values, list[float]]]:
    """Run with a record, as a user's run has: recording must not change what a script sees."""
    architecture = spec.parse_architecture(place.architecture)
    program = SCRIPTS[script].function.__code__.co_filename
    experiment = spec.Experiment(
        architecture=architecture,
        workload=spec.Workload(script=spec.Script(path=program)),
        cluster=spec.Cluster(workers=place.workers, servers=place.servers),
    )
    return run_members(
        run_script,
        script,
        expected(script, place) == "trains",
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
    results, settled = zip(*run(script, place, folder), strict=True)
    plain, start = alone[script]["values"], alone[script]["start"]
    if outcome == "equal":
        for rank, result in enumerate(results):
            check_equal(result, plain, f"worker {rank}, alone")
    elif outcome == "alike":
        for rank, result in enumerate(results[1:], start=1):
            check_equal(result, results[0], f"worker {rank}, worker 0")
    else:
        assert outcome in ("trains", "drifts")
        for weights in settled:
            check_moved(weights, plain["weights"], start, place)
            assert outcome == "drifts" or weights == pytest.approx(settled[0], abs=TOLERANCE)


def check_refusal(script: str, place: Place, words: str, folder: Path) -> None:
    with pytest.raises(MemberError) as caught:
        run(script, place, folder)
    match = REFUSAL.search(str(caught.value))
    assert match is not None, f"not refused by a sentence of ours:\n{caught.value}"
    assert match[1] != "DeadlineError", match[2]
    assert words in match[2], match[2]


def check_equal(given: Values, wanted: Values, who: str) -> None:
    assert given.keys() == wanted.keys()
    for name, values in wanted.items():
        if given[name] or not values:  # some numbers are known to worker 0 only
            close = pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE)
            assert given[name] == close, f"{name}: {who}"


def check_moved(weights: list[float], plain: list[float], start: list[float], place: Place) -> None:
    """Weights have moved about as far as the plain script's, and not against its direction.

    Asynchronous updates are twice as many with half the batch, so momentum takes them elsewhere.
    """
    assert all(math.isfinite(value) for value in weights)
    start = start[: len(plain)] + plain[len(start) :]  # what was added later has no start
    own, wanted = ([a - b for a, b in zip(end, start, strict=True)] for end in (weights, plain))
    if any(wanted):
        assert 0.2 < math.hypot(*own) / math.hypot(*wanted) < 6
        cosine = sum(map(operator.mul, own, wanted)) / math.hypot(*own) / math.hypot(*wanted)
        assert cosine > (0 if place.architecture.startswith("average") else -0.25)
    else:
        assert not any(own)


def test_every_row_is_a_script():
    assert set(SCRIPTS) >= ROWS
