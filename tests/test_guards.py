"""Rules of the house that a machine can check: layers, loading, names, the README's tree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import VERBS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "paceline"

LAYERS = [
    "errors", "units", "settings", "spec", "record", "protocol", "wire", "models", "compute",
    "data", "telemetry", "launch", "diagnose", "collectives", "autograd", "served",
    "architectures", "session", "builtin", "tensorflow", "predict", "tunnel", "engines", "bench",
    "search", "explain", "report", "observe", "cli", "testing",
]  # fmt: skip
"""Lowest first: a part may import itself and what stands before it."""

TORCH_FREE = [
    "errors", "units", "spec", "record", "protocol", "telemetry", "launch", "diagnose", "predict",
]  # fmt: skip


def parts() -> list[str]:
    found = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    return sorted(found - {"__init__", "__main__"})


def imported_parts(path: Path) -> set[str]:
    """Parts of the package that a file imports at its top level or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "paceline":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline."):
            names.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("paceline.")}
    return names & set(LAYERS)


def test_every_part_has_its_layer():
    assert set(parts()) <= set(LAYERS)


def test_the_layers_are_those_of_the_docs():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Layers")[1]
    assert re.findall(r"\w+", page[page.index("errors ·") : page.index("\n\n`spec`")]) == LAYERS


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_point_down(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part in ("__init__", "__main__"):
        return
    above = {name for name in imported_parts(path) if LAYERS.index(name) > LAYERS.index(part)}
    # A member is told to be an emulated one by name; nothing else reaches up.
    assert not above, f"{part} imports {above}, which stand above it"


@pytest.mark.parametrize("part", ["paceline", *(f"paceline.{p}" for p in TORCH_FREE)])
def test_loads_no_torch(part):
    if part.startswith("paceline.") and part.split(".")[1] not in parts():
        pytest.skip(f"{part} is not in this version")
    code = f"import sys, {part}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
GLOSSARY = dict(
    re.findall(r"^\| ([a-z][a-z, ]+) \| (.+) \|$", ARCHITECTURE.split("## Layers")[0], re.M)
)
"""Words of an exchange -> what each means; of the phases of a step too."""

WRITTEN = ("spec", "record")
"""These describe for a file what others are: a link, a member, a step."""


def test_the_glossary_has_the_words_and_one_meaning_for_each():
    words = {word for row in GLOSSARY for word in row.split(", ")}
    assert words >= {
        "seat",
        "chunk",
        "flat",
        "place",
        "bucket",
        "mailbox",
        "packet",
        "held",
        "crew",
    }
    for row, meaning in GLOSSARY.items():
        assert not re.search(r"\. Of ", meaning), f"{row} means two things: {meaning}"


def test_a_word_of_the_glossary_names_one_class():
    words = {"".join(map(str.capitalize, w.split())) for row in GLOSSARY for w in row.split(", ")}
    words |= {"Host", "Member", "Worker", "Server", "Device", "Link", "Architecture", "Experiment"}
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] in WRITTEN:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in words:
                found.setdefault(node.name, []).append(str(name))
    assert {"Member", "Packet", "Place", "Flat", "Chunk"} <= found.keys()
    several = {word: files for word, files in found.items() if len(files) > 1}
    assert not several, f"one word for several things: {several}"


def test_help_loads_no_torch():
    code = (
        "import sys; from paceline.cli.main import app\n"
        "try: app(['--help'], standalone_mode=False)\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("False")


def test_a_verb_is_one_file():
    """Whatever else is in `cli/` serves several."""
    cli = PACKAGE / "cli"
    beside = {p.stem for p in cli.glob("*.py")} - {*VERBS, "main", "__init__"}
    users = dict.fromkeys(beside, 0)
    for path in cli.glob("*.py"):
        words = set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
        for name in beside - {path.stem}:
            users[name] += name in words
    assert min(users.values()) >= 2, users


def test_public_names_are_sorted_and_exist():
    assert paceline.__all__ == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'distribut'"):
        paceline.distribut  # noqa: B018


LONGEST_FILE, MOST_METHODS, LONGEST_FUNCTION = 400, 25, 60
"""Lines of a file, methods of a class, lines of a function's body: more is two ideas in one."""

TOO_LARGE = {
    "cli/compare.py command",
    "cli/predict.py command",
    "protocol/closing.py", "protocol/exchange.py", "protocol/seat.py",
    "report/charts.py", "served/client.py", "served/device.py",
}  # fmt: skip
"""What is being taken apart: a file, or a function of one. Take an entry out when it fits."""


def too_large(path: Path) -> set[str]:
    """The file, where it or a class in it is too large; functions that are too long."""
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE))
    found = {name} if len(text.splitlines()) > LONGEST_FILE else set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {name} if len(methods) > MOST_METHODS else set()
        elif isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.body[0].lineno + 1
            found |= {f"{name} {node.name}"} if lines > LONGEST_FUNCTION else set()
    return found


def test_files_classes_and_functions_have_one_idea_each():
    found = set().union(*map(too_large, PACKAGE.rglob("*.py")))
    files = {name.partition(" ")[0] for name in TOO_LARGE}
    assert not {entry for entry in found if {entry, entry.partition(" ")[0]}.isdisjoint(TOO_LARGE)}
    assert not [name for name in files if not (PACKAGE / name).exists()], "take these out"


def test_no_module_is_named_for_nothing():
    foreign = {".venv", "build", "stand_ins"}  # stand-ins are named as what they stand for
    files = [p for p in ROOT.rglob("*.py") if foreign.isdisjoint(p.parts)]
    assert not [str(p) for p in files if p.stem in {"utils", "helpers", "misc", "common"}]


SHARED_NAMES = {"Action", "Loss"}
"""Class names that stand for two things still; take one out when it no longer does."""


def test_a_public_class_name_occurs_once():
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    several = {name: files for name, files in found.items() if len(files) > 1}
    assert not several.keys() - SHARED_NAMES, f"one name for several classes: {several}"


EXPLAINED_FOLDERS = [
    "session", "session/loader", "session/observers", "builtin", "launch", "diagnose", "compute",
    "record", "telemetry", "data", "models", "wire",
]  # fmt: skip


@pytest.mark.parametrize("folder", EXPLAINED_FOLDERS)
def test_a_folders_readme_names_its_files(folder):
    room = PACKAGE / folder
    text = (room / "README.md").read_text(encoding="utf-8")
    parts = [p for p in room.glob("*.py") if p.stem != "__init__"]
    names = [p.name for p in parts] + [f"{p.parent.name}/" for p in room.glob("*/__init__.py")]
    assert not [name for name in names if f"`{name}`" not in text]
    named = set(re.findall(r"^- ([^:]*):", text, re.MULTILINE))
    listed = {name for line in named for name in re.findall(r"`([^`]+)`", line)}
    assert not listed - set(names), "a file that is not there"


def test_readme_tree_is_complete():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme.split("## The tree")[1]
    missing = [
        part for part in parts() if not re.search(rf"^\s+{part}(/|\.py)", tree, re.MULTILINE)
    ]
    assert not missing, f"README's tree lacks {missing}"


@pytest.mark.parametrize("name", ["train", "keras"])
def test_examples_differ_in_at_most_four_lines(name):
    plain, ours = (
        (ROOT / "examples" / file).read_text(encoding="utf-8").split('"""', 2)[2].split("\n")
        for file in (f"{name}_plain.py", f"{name}_paceline.py")
    )
    added = [line for line in ours if line and line not in plain]
    removed = [line for line in plain if line and line not in ours]
    assert not removed
    assert 3 <= len(added) <= 4
