"""The laboratory: its files can be read, and what was recorded in it is still explained rightly."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from paceline.explain import explain
from paceline.explain.advice import MOST_ACTIONS
from paceline.explain.causes import RULES
from paceline.record import open_folder

ROOT = Path(__file__).parents[2]


def load_laboratory():
    """The benchmark's module: what it judges and how is written there once."""
    found = importlib.util.spec_from_file_location("laboratory", ROOT / "benchmarks/explain.py")
    module = importlib.util.module_from_spec(found)
    sys.modules["laboratory"] = module
    found.loader.exec_module(module)
    return module


LABORATORY = load_laboratory()
SITUATIONS = {situation.name: situation for situation in LABORATORY.situations()}
RECORDED = [name for name in SITUATIONS if (LABORATORY.RECORDED / f"{name}.tar.xz").exists()]


def test_every_situation_is_an_experiment_with_a_cause():
    assert len(SITUATIONS) >= 30
    causes = {situation.cause for situation in SITUATIONS.values()}
    assert causes <= {*RULES, ""}
    assert len(causes) >= 15
    for situation in SITUATIONS.values():
        LABORATORY.experiment_of(situation)


def test_a_busy_machine_is_no_excuse():
    """Others that use the cores are the answer where they are planted, and nowhere else."""
    excused = [s.name for s in SITUATIONS.values() if "cpu-taken" in s.also]
    assert excused == []


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Where every recorded run lies."""
    found = tmp_path_factory.mktemp("laboratory")
    for name in RECORDED:
        LABORATORY.unpack(name, found)
    return found


@pytest.fixture(scope="session")
def rows(place):
    """What `explain` says today of every recorded run, and of the one that followed its advice."""
    found = {}
    for name in RECORDED:
        found[name] = LABORATORY.judge(SITUATIONS[name], place / name, 1, may_run=False)
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_what_was_planted_is_named(rows, name):
    assert rows[name] is not None, "its first advice is another one now: record it again"
    assert rows[name]["right"], rows[name]["verdict"]


def test_gains_were_in_their_ranges(rows):
    promised = [row for row in rows.values() if "measured" in row]
    assert len(promised) >= 10
    outside = [row["situation"] for row in promised if not row["inside"]]
    assert len(outside) <= 0.2 * len(promised), outside
    assert [row["situation"] for row in promised if not row["sign"]] == []


BUSY = re.compile(r"(?:link|uplink of \w+|it) is busy (\d+)% of the time(.*)")


@pytest.mark.parametrize("name", RECORDED)
def test_no_second_is_charged_twice(place, name):
    found = explain(open_folder(place / name / "before-0"))
    assert all(0 <= part.lost_seconds <= part.seconds + 1e-9 for part in found.parts)
    charged = [cause.fraction for cause in found.causes if cause.name != "first-steps"]
    assert sum(charged) <= 1 + 1e-9
    assert len(found.actions) <= MOST_ACTIONS


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_less_than_half_busy_is_said_to_idle(place, name):
    for cause in explain(open_folder(place / name / "before-0")).causes:
        said = BUSY.search(cause.text)
        if said is not None and int(said[1]) < 50:
            assert "idles" in said[2], cause.text
