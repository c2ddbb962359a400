"""The laboratory: its files can be read, and what was recorded in it is still explained rightly."""

import importlib.util
import sys
from pathlib import Path
from typing import get_args

import pytest

from paceline.explain.findings import CauseName

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
    assert causes <= {*get_args(CauseName), ""}
    assert len(causes) >= 15
    for situation in SITUATIONS.values():
        LABORATORY.experiment_of(situation)


def test_a_busy_machine_is_no_excuse():
    """Others that use the cores are the answer where they are planted, and nowhere else."""
    excused = [s.name for s in SITUATIONS.values() if "cpu-taken" in s.also]
    assert excused == []


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """What `explain` says today of every recorded run, and of the one that followed its advice."""
    place = tmp_path_factory.mktemp("laboratory")
    found = {}
    for name in RECORDED:
        LABORATORY.unpack(name, place)
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
