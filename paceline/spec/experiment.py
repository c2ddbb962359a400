"""The question: an Experiment, read from TOML, written back, checked as a whole."""

import tomllib
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

import msgspec
import tomli_w

from paceline.errors import SpecError, suggest
from paceline.spec.architecture import (
    Architecture,
    architecture_name,
    decode_architecture,
    decode_hook,
    find_architecture,
    parse_architecture,
)
from paceline.spec.base import Spec, check_numbers, expected, require
from paceline.spec.cluster import Cluster
from paceline.spec.faults import Fault
from paceline.spec.one_process import Auto
from paceline.spec.prediction import Prediction
from paceline.spec.workload import Workload


class Measurement(Spec, frozen=True, kw_only=True):
    """What is left out of the figures, and how finely the machine is watched."""

    warmup_steps: int = 5
    """First steps of every worker that no figure counts."""

    sample_seconds: float = 1.0
    """Time between two samples of CPU, memory, bytes and packets."""

    def __post_init__(self) -> None:
        where = "[measurement]"
        problem = f"sample_seconds = {self.sample_seconds:g} is below 0.05."
        require(self.sample_seconds >= 0.05, where, problem, "write 1.0.")
        problem = f"warmup_steps = {self.warmup_steps} is negative."
        require(self.warmup_steps >= 0, where, problem, "write 0 or more.")


class Experiment(Spec, frozen=True, kw_only=True):
    """One question, in full. An engine answers it with a run."""

    name: str = ""
    workload: Workload = Workload()
    architecture: Architecture = Auto()
    cluster: Cluster = Cluster()
    measurement: Measurement = Measurement()
    settings: dict[str, int | float | str | bool] = msgspec.field(default_factory=dict)
    """What `paceline.setting(NAME, default)` returns in the user's own code."""

    faults: tuple[Fault, ...] = ()
    prediction: Prediction = Prediction()
    engine: Literal["here", "tunnel", "predict"] = "here"

    def __post_init__(self) -> None:
        where, cluster = "[cluster]", self.cluster
        kind, name = self.architecture, architecture_name(self.architecture)
        alone = not kind.is_one_process or cluster.workers == 1
        problem = f"workers = {cluster.workers}, but {name} is one worker."
        require(alone, where, problem, kind.fix_for_workers(cluster.workers))
        problem = f"a script cannot be {name}: it trains built-in models only."
        fix = f"choose ring or server, or a built-in model: `paceline train --architecture {name}`."
        fits = self.workload.script is None or kind.takes_scripts
        require(fits, "--architecture", problem, fix)
        kind.check(self.workload, cluster)
        problem = f"servers = {cluster.servers}, but {name} has no servers."
        require(kind.takes_servers or not cluster.servers, where, problem, "leave servers out.")
        total = self.workload.global_batch
        problem = f"global_batch = {total} cannot be split over {cluster.workers} workers."
        enough = not total or total >= cluster.workers
        require(enough, "[workload]", problem, "give every worker at least one sample.")

    def __hash__(self) -> int:
        """Hash what a dictionary of settings cannot be part of; equal experiments hash alike."""
        return hash((self.name, self.workload, self.architecture, self.cluster, self.engine))

    @property
    def num_servers(self) -> int:
        """Dedicated server members to start: as asked, or one where the architecture needs one."""
        return self.cluster.servers or (1 if self.architecture.needs_servers else 0)


def load(path: Path, *, recorded: bool = False) -> Experiment:
    """Read an experiment file; every mistake in it is a SpecError that names the place. `recorded`:
    it was run, and options that were taken and had no effect do not matter any more."""
    tables = read_tables(path)
    kind = tables.get("architecture")
    if recorded and isinstance(kind, dict) and isinstance(kind.get("name"), str):
        tables["architecture"] = find_architecture(kind["name"], str(path)).effective(kind)
    return from_tables(tables, str(path))


def read_tables(path: Path) -> dict[str, Any]:
    """What a TOML file holds."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(str(path), "there is no such file.", "check the path.") from None
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}."
        raise SpecError(str(path), problem, "name a file that can be.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(str(path), f"this is not TOML: {error}.", "mend that line.") from None


def from_tables(tables: dict[str, Any], where: str) -> Experiment:
    """Build an experiment from nested tables, as TOML or flags give them."""
    tables = dict(tables)
    kind = tables.get("architecture")
    if isinstance(kind, str):
        tables["architecture"] = parse_architecture(kind, f"{where}, architecture")
    elif isinstance(kind, dict):
        tables["architecture"] = decode_architecture(kind, f"{where}, [architecture]")
    _refuse_unknown(tables, Experiment, where, "")
    try:
        made = msgspec.convert(tables, Experiment, dec_hook=decode_hook)
        check_numbers(made, where)
        return made
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        message, _, place = str(error).partition(" - at `$.")
        raise _misfit(tables, message, place.rstrip("`"), where) from None


def _misfit(tables: dict[str, Any], message: str, place: str, where: str) -> SpecError:
    """The error for a value of another kind than its field's; `place` is where msgspec saw it."""
    value: Any = tables
    kind: Any = Experiment
    for key in place.split("."):
        if not (isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Spec)):
            break
        value = value.get(key)
        kind = {field.name: field.type for field in msgspec.structs.fields(kind)}.get(key)
    else:
        problem = f"{_shown(value)} is no value of it."
        return SpecError(f"{where}, {place}", problem, f"write {expected(kind)}.")
    fix = "write what is expected; `paceline train --help` tells of flags with the same names."
    return SpecError(f"{where}, {place}" if place else where, f"{message}.", fix)


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def to_toml(experiment: Experiment) -> str:
    """The experiment as a file that `load` reads back."""
    tables = msgspec.to_builtins(experiment)
    if experiment.workload.script is not None:  # nothing else is known of it
        tables["workload"] = {"script": tables["workload"]["script"]}
    return tomli_w.dumps(tables)


def replace(experiment: Experiment, **changes: Any) -> Experiment:
    """A copy with other fields, checked like the first: `replace(e, workers=2, batch=64)`.

    A field is found by its name in the experiment or in one of its parts.
    """
    tables = msgspec.to_builtins(experiment)
    for key, value in changes.items():
        if key in Experiment.__struct_fields__:
            tables[key] = msgspec.to_builtins(value)
            continue
        for part, kind in _PARTS.items():
            if key in kind.__struct_fields__:
                tables.setdefault(part, {})[key] = msgspec.to_builtins(value)
                break
        else:
            raise TypeError(f"no part of an experiment has a field {key}")
    return from_tables(tables, "experiment")


_PARTS: dict[str, type[Spec]] = {
    "workload": Workload,
    "cluster": Cluster,
    "measurement": Measurement,
    "prediction": Prediction,
}


def _refuse_unknown(table: dict[str, Any], kind: type[Spec], where: str, path: str) -> None:
    """msgspec refuses unknown keys too; this finds the nearest known one for the message."""
    for key, value in table.items():
        if key not in kind.__struct_fields__:
            place = f"{where}, [{path}]" if path else where
            raise SpecError(place, f'unknown key "{key}".', suggest(key, kind.__struct_fields__))
        field_type = next(f.type for f in msgspec.structs.fields(kind) if f.name == key)
        if isinstance(field_type, UnionType) and field_type.__args__[1:] == (NoneType,):
            field_type = field_type.__args__[0]
        if (
            isinstance(value, dict)
            and isinstance(field_type, type)
            and issubclass(field_type, Spec)
        ):
            _refuse_unknown(value, field_type, where, f"{path}.{key}" if path else key)
