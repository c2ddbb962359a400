"""A wheel installs and answers without the repository: profiles, papers and templates are in it."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def call(*command: object, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from what git knows, so that nothing lying about gets in."""
    pytest.importorskip("setuptools", reason="nothing to build a wheel with")
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    listed = call("git", "ls-files", "paceline", "pyproject.toml", "README.md", "LICENSE", cwd=ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    call(*pip, "--wheel-dir", place, source, cwd=place)
    (built,) = place.glob("*.whl")
    return built, {name for name in listed.splitlines() if name.startswith("paceline/")}


def test_every_file_of_the_package_is_in_it(wheel):
    built, listed = wheel
    inside = set(zipfile.ZipFile(built).namelist())
    assert listed - inside == set()


def test_it_answers_where_there_is_no_repository(wheel, tmp_path):
    built, _ = wheel
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    call(*pip, "--no-index", built, cwd=tmp_path)
    # Dependencies are borrowed: a path in a .pth file brings packages, and no editable install.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    paceline = environment / "bin" / "paceline"
    where = call(python, "-c", "import paceline; print(paceline.__file__)", cwd=tmp_path)
    assert where.startswith(str(environment)), "the repository's package was used"
    question = ("--model", "resnet50", "--device", "v100", "--workers", "4", "--data", "synthetic")
    said = call(
        *(paceline, "train", "--on", "predict", "--link", "10gbit", "--architecture", "ring"),
        *(*question, "--steps", "20", "--out", tmp_path / "run", "--json"),
        cwd=tmp_path,
    )
    assert json.loads(said)["samples_per_second"] > 0
    call(paceline, "report", tmp_path / "run", "--out", tmp_path / "page", cwd=tmp_path)
    assert (tmp_path / "page" / "index.html").stat().st_size > 10_000
    assert "p1" in call(paceline, "reproduce", "--list", cwd=tmp_path)
