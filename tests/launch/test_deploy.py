"""The images' recipes name files that exist, and install what the tests pass with."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
APPTAINER = (ROOT / "deploy" / "paceline.def").read_text()


def copied() -> dict[str, list[str]]:
    lines = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
    files = APPTAINER.partition("%files\n")[2].partition("\n\n")[0].splitlines()
    return {
        "Dockerfile": [name for line in lines for name in line.split()],
        "paceline.def": [line.split()[0] for line in files],
    }


@pytest.mark.parametrize("recipe", copied())
def test_what_is_copied_exists(recipe: str) -> None:
    names = copied()[recipe]
    assert {"paceline", "pyproject.toml", "constraints.txt"} <= set(names)
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_docker_is_given_what_it_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    assert set(copied()["Dockerfile"]) <= allowed


@pytest.mark.parametrize("text", [DOCKERFILE, APPTAINER], ids=["docker", "apptainer"])
def test_both_pin_versions_and_share_a_base(text: str) -> None:
    assert "--constraint constraints.txt" in text
    (base,) = re.findall(r"^(?:FROM|From:) (\S+)$", text, re.MULTILINE)
    assert base == "python:3.11-slim-bookworm"
