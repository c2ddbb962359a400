"""What the docs show can be typed, and where they point to is something."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from paceline.cli.main import VERBS, app, main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(paceline [^`]+)`")
NAMED = re.compile(r"docs/[\w./-]+\.md")
DRY = {"train", "run", "compare", "predict"}
"""Verbs whose question can be resolved without asking it."""


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Headings as their addresses: lower case, words joined by dashes."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(there), f"{there.name} has no heading #{anchor}"


def commands() -> dict[str, list[str]]:
    """Every `paceline …` in the docs, as it is written -> its arguments."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        if page.parent.name == "decisions":
            continue
        text = page.read_text()
        lines = [line for block in FENCE.findall(text) for line in joined(block).splitlines()]
        shown = [line for line in lines if re.search(r"(^|[ /])paceline (?!as )", line)]
        shown += INLINE.findall(prose(page))
        found |= {line: words for line in shown if (words := arguments(line))}
    return found


def joined(block: str) -> str:
    return re.sub(r"\\\n\s*", " ", block)


def arguments(line: str) -> list[str]:
    """What follows `paceline`; nothing for a sentence, an import, or what a command printed."""
    line = re.sub(r"\s#.*$", "", line).replace("\\|", "|")
    line = line.partition("> job")[0]
    try:
        words = shlex.split(line.split("|")[0])
    except ValueError:  # an apostrophe: prose
        return []
    places = [n for n, word in enumerate(words) if word.rpartition("/")[2] == "paceline"]
    if not places or words[0] in ("import", "from", "cd", "git"):
        return []
    rest = words[places[0] + 1 :]
    if rest[-1:] == ["…"] and not rest[-2:-1][0].startswith("--"):
        rest = rest[:-1]  # and so on
    return rest if rest and (rest[0] in VERBS or rest[0].startswith("-")) else []


COMMANDS = commands()


def test_pages_that_messages_name_exist():
    sources = (ROOT / "paceline").rglob("*.py")
    named = {page for path in sources for page in NAMED.findall(path.read_text())}
    assert named
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


def test_commands_were_found():
    assert {words[0] for words in COMMANDS.values()} >= {"train", "run", "explain", "compare"}
    assert len(COMMANDS) > 40


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_parses(line):
    words = COMMANDS[line]
    if words[0] == "--version":
        return
    group = typer.main.get_command(app)
    verb = group.get_command(None, words[0])
    try:
        verb.make_context(words[0], list(words[1:]))
    except Exception as error:
        said = getattr(error, "message", str(error))
        spoken_of = len(words) == 1 or "…" in line  # a verb in a sentence, or a part of a command
        alone = spoken_of and "Missing" in type(error).__name__
        assert alone or "does not exist" in said, f"{line}: {said}"


def is_complete(line: str) -> bool:
    """Whether a command stands there whole, and names nothing that only the reader has."""
    words = COMMANDS[line]
    own = r"[A-Z_]{3,}(=.*)?|.*\.(toml|json)|train\.py|.*….*"
    named = [word for word in words if re.fullmatch(own, word)]
    if words[0] == "compare" and not {"--architectures", "--peers"} & set(words):
        return False
    return words[0] in DRY and len(words) > 1 and not named and "…" not in line


@pytest.mark.parametrize("line", [line for line in COMMANDS if is_complete(line)])
def test_every_whole_question_can_be_asked(line, monkeypatch, capsys):
    words = COMMANDS[line]
    if {"--scorecard", "--resume", "--launcher"} & set(words):
        return
    monkeypatch.chdir(ROOT)
    cut = 1 if words[0] == "run" else len(words)  # a script's arguments come last
    with pytest.raises(SystemExit) as ended:
        main([*words[:cut], "--dry-run", *words[cut:]])
    assert ended.value.code == 0, capsys.readouterr().err


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "distribute" in (tmp_path / "api.html").read_text()
