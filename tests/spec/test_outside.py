"""Two architectures from outside the package: nothing is silently wrong about them anywhere.

`lockstep` is the package that docs/adding-an-architecture.md shows, copied from the page. `silent`
states no more than it must.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import spec
from paceline.errors import SpecError
from paceline.record import RunFolder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-an-architecture.md"
SILENT = """
from typing import ClassVar

from paceline.spec import ArchitectureFacts, Spec


class Silent(ArchitectureFacts, Spec, frozen=True, kw_only=True, tag_field="name", tag="silent"):
    built_by: ClassVar[str] = "lockstep.worker:build"
    every: int = 1

    @property
    def waits_for_all(self) -> bool:
        return True

    @property
    def exclusive(self) -> bool:
        return False
"""
UNSTATED = SILENT.replace("Silent", "Unstated").replace('"silent"', '"unstated"')
UNSTATED = UNSTATED[: UNSTATED.index("    @property\n    def exclusive")]


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder with the packages, as an installation leaves them."""
    folder = tmp_path_factory.mktemp("outside")
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (lockstep/\w+\.py)\n(.*?)```", page, re.DOTALL)
    (entry,) = re.findall(r"```toml\n.*?(\[project.*?)```", page, re.DOTALL)
    (name, value) = re.search(r'(\w+) = "(.*?)"', entry).groups()
    (folder / "lockstep").mkdir()
    for path, text in blocks:
        (folder / path).write_text(text, encoding="utf-8")
    (folder / "silent.py").write_text(SILENT, encoding="utf-8")
    (folder / "unstated.py").write_text(UNSTATED, encoding="utf-8")
    installed = folder / "outside-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: outside\nVersion: 1.0\n", encoding="utf-8")
    points = f"[paceline.architectures]\n{name} = {value}\nsilent = silent:Silent\n"
    points += "unstated = unstated:Unstated\n"
    (installed / "entry_points.txt").write_text(points, encoding="utf-8")
    return folder


@pytest.fixture
def known(outside, monkeypatch):
    """The packages can be imported in this process."""
    monkeypatch.syspath_prepend(str(outside))


@pytest.fixture(scope="module")
def paceline(outside):
    """Runs a command where the packages are installed; returns its status, stdout and stderr."""

    def call(*arguments):
        found = subprocess.run(
            [sys.executable, "-m", "paceline", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(outside)},
            cwd=outside,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return found.returncode, found.stdout, found.stderr

    return call


@pytest.fixture(scope="module")
def trained(paceline, outside):
    """Runs of two workers with each of the two."""
    runs = {}
    for name in ("lockstep", "silent"):
        runs[name] = outside / "runs" / name
        status, _, told = paceline(
            *("train", "--workers", "2", "-a", name, "--model", "adult-dnn", "--data", "synthetic"),
            *("--steps", "8", "--batch", "16", "--out", runs[name]),
        )
        assert status == 0, told
    return runs


def test_an_outside_architecture_is_written_and_read_back(known):
    kind = spec.parse_architecture("silent:every=3")
    assert spec.format_architecture(kind) == "silent:every=3"
    asked = spec.Experiment(architecture=kind)
    assert spec.replace(asked, workers=2).architecture == kind
    with pytest.raises(SpecError, match='"evry" is not an option of silent') as raised:
        spec.parse_architecture("silent:evry=3")
    assert 'did you mean "every"' in str(raised.value)


def test_a_fact_that_must_be_stated_and_is_not_is_named(known):
    with pytest.raises(SpecError, match="it does not state exclusive"):
        spec.parse_architecture("unstated")


def test_a_name_that_nobody_brings_is_refused_with_the_nearest_known_one(known):
    with pytest.raises(SpecError, match='"lockstp" is not an architecture') as raised:
        spec.parse_architecture("lockstp")
    assert 'did you mean "lockstep"' in str(raised.value)


def test_it_trains_and_is_recorded_under_its_name(known, trained):
    for name, path in trained.items():
        summary = RunFolder(path).summary()
        assert (summary.status, summary.architecture) == ("finished", name)
        assert summary.loss is not None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--servers", "1"), "silent has no servers"),
        (("--on-loss", "continue"), "the workers of silent cannot go on without one"),
        (("--on", "predict"), "silent cannot be predicted yet"),
    ],
)
def test_what_it_does_not_state_is_refused(paceline, arguments, problem):
    status, _, told = paceline("train", "--workers", "2", "-a", "silent", *arguments)
    assert status == 2
    assert problem in " ".join(told.split())


def test_a_script_is_refused_where_it_takes_none(paceline, outside):
    (outside / "script.py").write_text("import paceline\n", encoding="utf-8")
    status, _, told = paceline("run", "-n", "2", "-a", "silent", "script.py")
    assert status == 2
    assert "a script cannot be silent" in " ".join(told.split())


def test_it_is_predicted_by_its_own_model_or_refused(paceline):
    command = ("predict", "--model", "resnet50", "--device", "v100", "--batch", "32")
    command += ("--link", "1gbit", "--workers", "2,4", "--json")
    status, _, told = paceline(*command, "-a", "silent")
    assert status == 2
    assert "silent cannot be predicted yet" in told
    rates = {}
    for name in ("lockstep", "ring"):
        status, out, told = paceline(*command, "-a", name)
        assert status == 0, told
        rates[name] = [point["samples_per_second"] for point in json.loads(out)["points"]]
    assert all(own < ring for own, ring in zip(rates["lockstep"], rates["ring"], strict=True))


def test_a_predicted_run_has_the_bytes_that_it_states(paceline, outside):
    run = outside / "runs" / "predicted"
    status, _, told = paceline(
        *("train", "--workers", "4", "-a", "lockstep", "--on", "predict", "--model", "resnet50"),
        *("--device", "v100", "--link", "1gbit", "--batch", "32", "--out", run),
    )
    assert status == 0, told
    assert RunFolder(run).summary().bytes_per_step == pytest.approx(4 * 1.5 * 102e6, rel=0.02)


def test_explain_says_that_the_cost_of_delays_is_unknown(paceline, trained):
    status, out, told = paceline("explain", trained["silent"], "--link", "1gbit,50ms", "--json")
    assert status == 0, told
    parts = {part["name"]: part["counter"] for part in json.loads(out)["parts"]}
    assert "exchange: latency" not in parts
    assert "unknown" in parts["exchange: transport"]
    assert "messages of silent" in parts["exchange: transport"]


def test_compare_and_report_show_it_beside_ours(paceline, outside):
    folder = outside / "compared"
    status, out, told = paceline(
        *("compare", "--model", "adult-dnn", "--data", "synthetic", "--steps", "8"),
        *("--architectures", "ring,lockstep", "--workers", "2", "--repeats", "1"),
        *("--out", folder, "--json"),
    )
    assert status == 0, told
    rows = {row["architecture"]: row for row in json.loads(out)["rows"]}
    assert {"single", "ring", "lockstep"} <= set(rows)
    status, _, told = paceline("report", folder)
    assert status == 0, told
    (page,) = folder.glob("report/*.html")
    assert "lockstep" in page.read_text(encoding="utf-8")


def test_a_run_is_readable_where_its_architecture_is_not_installed(trained):
    with pytest.raises(SpecError, match='"lockstep" is not an architecture'):
        RunFolder(trained["lockstep"]).experiment()
    assert RunFolder(trained["lockstep"]).summary().architecture == "lockstep"
