"""The table of architectures, and how one is read and written.

`parse_architecture("server:mode=async")` and the TOML table `[architecture]` with `name = "server"`
and `mode = "async"` give the same structure. A package of another author adds an architecture by an
entry point of the group `paceline.architectures` (docs/adding-an-architecture.md).
"""

from collections.abc import Collection, Mapping
from importlib import metadata
from typing import Any

import msgspec

from paceline.errors import SpecError, suggest
from paceline.spec.all_reduce import Average, Hybrid, Ring
from paceline.spec.base import Spec, check_numbers, expected, written
from paceline.spec.facts import MUST_STATE, ArchitectureFacts
from paceline.spec.one_process import Auto, Replicated, Single
from paceline.spec.pipeline import Pipeline
from paceline.spec.server import Server

Architecture = ArchitectureFacts
"""The type of a field that holds any architecture, ours or another author's."""

GROUP = "paceline.architectures"

ARCHITECTURES: dict[str, type[Architecture]] = {
    "auto": Auto,
    "single": Single,
    "ring": Ring,
    "server": Server,
    "average": Average,
    "hybrid": Hybrid,
    "replicated": Replicated,
    "pipeline": Pipeline,
}


def known_architectures() -> dict[str, str]:
    """The name of every architecture, ours and installed ones, and who brings it."""
    installed = {one.name: one.value for one in metadata.entry_points(group=GROUP)}
    return {**installed, **dict.fromkeys(ARCHITECTURES, "paceline")}


def find_architecture(name: str, where: str = "--architecture") -> type[Architecture]:
    """The structure of the architecture that users call `name`."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    for entry in metadata.entry_points(group=GROUP, name=name):
        kind: type[Architecture] = entry.load()
        _check_stated(kind, name, entry.value)
        return kind
    problem = f'"{name}" is not an architecture.'
    raise SpecError(where, problem, suggest(name, known_architectures()))


def _check_stated(kind: type[Architecture], name: str, value: str) -> None:
    """Raise SpecError where another author's architecture leaves a fact open that has no default
    on the safe side."""
    where = f"architecture {name} ({value})"
    fix = "see docs/adding-an-architecture.md."
    if not (issubclass(kind, ArchitectureFacts) and issubclass(kind, Spec)):
        raise SpecError(where, "it is not a structure of ArchitectureFacts and Spec.", fix)
    if architecture_name(kind) != name:
        problem = f'its structure has the tag "{architecture_name(kind)}".'
        raise SpecError(where, problem, f'write tag_field="name", tag="{name}".')
    for fact in MUST_STATE:
        if getattr(kind, fact) is getattr(ArchitectureFacts, fact):
            raise SpecError(where, f"it does not state {fact}.", fix)
    if not kind.built_by:
        raise SpecError(where, "it does not state built_by.", fix)


def architecture_name(architecture: Architecture | type[Architecture]) -> str:
    """The name that the user types, "server"."""
    assert isinstance(architecture, Spec) or (
        isinstance(architecture, type) and issubclass(architecture, Spec)
    )
    return str(architecture.__struct_config__.tag)


def parse_architecture(text: str, where: str = "--architecture") -> Architecture:
    """Return the structure for "name" or "name:key=value,key=value"."""
    name, _, options = text.partition(":")
    fields: dict[str, str] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            fix = f'write "{name}:{key}=…", or leave it out.'
            raise SpecError(where, f'option "{option}" of {name} has no value.', fix)
        if key in fields:
            raise SpecError(where, f'"{key}" of {name} is given twice.', "keep one of them.")
        fields[key] = value
    return _convert(name, fields, where, strict=False)


def decode_architecture(table: Mapping[str, Any], where: str) -> Architecture:
    """Return the structure for a table as TOML or JSON gives it."""
    if not isinstance(table.get("name"), str):
        problem = "the architecture has no name."
        raise SpecError(where, problem, 'write name = "ring", or another architecture.')
    fields = {key: value for key, value in table.items() if key != "name"}
    return _convert(table["name"], fields, where, strict=True)


def decode_hook(kind: type, value: Any) -> Any:
    """What msgspec calls for a field that holds an architecture."""
    if kind is not ArchitectureFacts:
        raise NotImplementedError
    if isinstance(value, dict):
        return decode_architecture(value, "[architecture]")
    return value


def _convert(name: str, fields: Mapping[str, Any], where: str, *, strict: bool) -> Architecture:
    kind = find_architecture(name, where)
    assert issubclass(kind, Spec)
    _check_keys(name, fields, kind.__struct_fields__, where)
    try:
        made: Any = msgspec.convert({"name": name, **fields}, kind, strict=strict)
        check_numbers(made, where)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        key = str(error).rpartition("$.")[2].rstrip("`")
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        problem = f'"{written(fields[key])}" is no value of {key}, an option of {name}.'
        raise SpecError(where, problem, f"write {expected(types[key])}.") from None
    assert isinstance(made, ArchitectureFacts)
    return made


def _check_keys(name: str, given: Collection[str], known: Collection[str], where: str) -> None:
    for key in given:
        if key not in known:
            fix = suggest(key, known) if known else "leave it out."
            raise SpecError(where, f'"{key}" is not an option of {name}.', fix)


def format_architecture(architecture: Architecture) -> str:
    """The inverse of `parse_architecture`; options at their defaults are left out."""
    fields = dict(msgspec.to_builtins(architecture))
    name = fields.pop("name")
    options = ",".join(f"{key}={written(value)}" for key, value in fields.items())
    return f"{name}:{options}" if options else str(name)
