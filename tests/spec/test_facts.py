"""Facts about an architecture are asked of its structure, and nowhere found out by its class."""

import ast
from pathlib import Path

import pytest

import paceline
from paceline import spec
from paceline.errors import SpecError

ROOT = Path(paceline.__file__).parent
CLASSES = {kind.__name__ for kind in spec.ARCHITECTURES.values()}
NAMES = set(spec.ARCHITECTURES)


def architectures_told_apart(source):
    """Lines that ask which architecture something is: by class, by pattern, by name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "isinstance",
            "issubclass",
        ):
            asked = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            by_name = any("architecture_name(" in ast.unparse(side) for side in sides)
            by_type = any(ast.unparse(side).startswith("type(") for side in sides)
            asked = sides if by_name or by_type else []
        else:
            continue
        for part in (one for side in asked for one in ast.walk(side)):
            is_class = isinstance(part, ast.Attribute) and ast.unparse(part.value) == "spec"
            name = getattr(part, "attr", None) if is_class else getattr(part, "id", None)
            text = part.value if isinstance(part, ast.Constant) else None
            if name in CLASSES or (isinstance(text, str) and text in NAMES):
                found.append(node.lineno if hasattr(node, "lineno") else asked[0].lineno)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "if isinstance(kind, spec.Ring): pass",
        "assert isinstance(kind, spec.Ring | spec.Average)",
        "isinstance(kind, (Server, Hybrid))",
        "match kind:\n    case spec.Pipeline(): pass",
        "if type(kind) is spec.Single: pass",
        "if spec.architecture_name(kind) == 'ring': pass",
    ],
)
def test_the_guard_sees_every_way_to_tell_architectures_apart(line):
    assert architectures_told_apart(line)


def test_architectures_are_told_apart_only_in_spec():
    files = [path for path in ROOT.rglob("*.py") if path.parent != ROOT / "spec"]
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in architectures_told_apart(path.read_text(encoding="utf-8"))
    }
    assert found == set(), "ask a fact of the architecture (docs/adding-an-architecture.md)"


def test_unknown_is_the_default_of_what_nobody_states():
    class Silent(spec.ArchitectureFacts, spec.Spec, frozen=True, tag_field="name", tag="silent"):
        pass

    silent = Silent()
    assert silent.rounds(4, 4) is None
    assert silent.copies_sent(4, 0) is None
    taken = [name for name in dir(silent) if name.startswith("takes_")]
    assert [name for name in taken if getattr(silent, name)] == ["takes_one_worker"]
    for fact in ("waits_for_all", "exclusive"):
        with pytest.raises(NotImplementedError):
            getattr(silent, fact)


@pytest.mark.parametrize(
    ("text", "workers", "hosts", "rounds", "copies"),
    [
        ("single", 1, 1, 0, 0),
        ("ring", 4, 4, 6, 1.5),
        ("average:every=3", 4, 4, 2, 0.5),
        ("average:every=3,state=true", 4, 4, 2, 1.5),
        ("hybrid", 4, 2, 2, 1.5),
        ("server", 4, 4, 2, None),
        ("pipeline:replicas=2", 4, 4, 4, None),
    ],
)
def test_facts_are_those_of_the_closed_forms(text, workers, hosts, rounds, copies):
    kind = spec.parse_architecture(text)
    assert kind.rounds(workers, hosts) == rounds
    sent = kind.copies_sent(workers, 2)
    assert sent == (None if copies is None else pytest.approx(copies))


def test_a_recorded_option_without_effect_is_forgotten_and_a_typed_one_refused():
    with pytest.raises(SpecError, match="has no effect"):
        spec.parse_architecture("server:staleness=5")
    kind = spec.parse_architecture("server:mode=bounded,staleness=5")
    assert spec.format_architecture(kind.changed(mode="sync")) == "server"
