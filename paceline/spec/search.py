"""A search: one experiment, the settings that are tried, and the goal they are judged by.

A search file is an experiment file with a table `[search]`; `[search.try]` holds one entry per
setting. A setting is a field of the experiment (`learning_rate`, `batch`, `architecture`), a
command-line option of the user's script (`--lr`), or `setting.NAME`, which code asks for with
`paceline.setting("NAME", default)`.
"""

import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w

from paceline.errors import SpecError, suggest
from paceline.spec.architecture import parse_architecture
from paceline.spec.base import Spec, require
from paceline.spec.cluster import Cluster
from paceline.spec.experiment import Experiment, from_tables, read_tables, replace
from paceline.spec.workload import Optimizer, Workload

Value = int | float | str | bool

SETTING, OPTION = "setting.", "--"
"""How the names of a user's own settings begin."""

RANGE = re.compile(r"\s*(?P<low>[^:]+?)\.\.(?P<high>[^:]+?)\s*(?::(?P<scale>\w+))?\s*")
MOST_CHOICES = 10_000
MOST_PARALLEL = 256


class Range(Spec, frozen=True, kw_only=True):
    """Numbers between two ends, both included."""

    low: int | float
    high: int | float
    log: bool = False
    """Draw evenly from the logarithm: as many values from 0.001 to 0.01 as from 0.01 to 0.1."""

    @property
    def whole(self) -> bool:
        """Return whether only whole numbers are drawn."""
        return isinstance(self.low, int) and isinstance(self.high, int)


class ValueList(Spec, frozen=True, kw_only=True):
    """One of a few values."""

    values: tuple[Value, ...]


Dimension = Range | ValueList


class Goal(Spec, frozen=True, kw_only=True):
    """What is compared, and whether more of it is better."""

    name: Literal["accuracy", "loss", "time", "throughput", "cost"]
    loss: float | None = None
    """The loss to reach, for `time`, and for `cost` where the cost of reaching it is meant."""

    @property
    def maximizes(self) -> bool:
        """Return whether a larger value wins."""
        return self.name in ("accuracy", "throughput")

    @property
    def is_speed(self) -> bool:
        """Return whether the goal does not depend on what is learned."""
        return self.name == "throughput" or (self.name == "cost" and self.loss is None)

    @property
    def title(self) -> str:
        """Return the goal with its unit, as tables and charts show it."""
        titles = {
            "accuracy": "accuracy (top 1)",
            "loss": "loss at the end",
            "time": f"seconds to a loss of {self.loss:g}" if self.loss is not None else "seconds",
            "throughput": "samples/s",
            "cost": "cost per million samples",
        }
        if self.name == "cost" and self.loss is not None:
            return f"cost to a loss of {self.loss:g}"
        return titles[self.name]

    def __str__(self) -> str:
        return self.name if self.loss is None else f"{self.name}:loss={self.loss:g}"


class Search(Spec, frozen=True, kw_only=True):
    """How settings are chosen, and how many trials are run."""

    tried: dict[str, str] = msgspec.field(name="try", default_factory=dict)
    """Setting -> its values, as `--try` takes them: "0.001..1:log" or "32,64,128"."""

    goal: str = "loss"
    trials: int = 20
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    pruner: Literal["median", "asha", "hyperband", "none"] = "median"
    seed: int = 0
    parallel: int = 1
    """Trials that run at the same time."""

    predict: bool = True
    """Leave out settings that cannot win by prediction, where the goal is speed or cost."""

    price_per_hour: float = 0.0
    """Price of one host for one hour; the goal `cost` needs it."""

    currency: str = ""

    def __post_init__(self) -> None:
        where = "[search]"
        for name in ("trials", "parallel"):
            value = getattr(self, name)
            problem = f"{name} must be at least 1 (got {value})."
            require(value >= 1, where, problem, f"write {name} = 1 or more.")
        problem = f"trials must be at most {MOST_CHOICES} (got {self.trials})."
        require(self.trials <= MOST_CHOICES, where, problem, "write fewer trials.")
        problem = f"parallel must be at most {MOST_PARALLEL} (got {self.parallel})."
        require(self.parallel <= MOST_PARALLEL, where, problem, "write fewer trials at a time.")
        problem = f"seed must lie within 64 bits (got {self.seed})."
        require(-(2**63) <= self.seed < 2**63, where, problem, "write a smaller one.")
        problem = f"price_per_hour must not be negative (got {self.price_per_hour:g})."
        priced = self.price_per_hour >= 0 and math.isfinite(self.price_per_hour)
        require(priced, where, problem, "write the price of one host for one hour.")
        needs_price = parse_goal(self.goal).name == "cost"
        problem = "the goal cost needs a price."
        fix = "add --price 2.10/h, the price of one host for one hour."
        require(not needs_price or self.price_per_hour > 0, where, problem, fix)
        if self.sampler == "grid":
            for name, dimension in self.dimensions().items():
                problem = f"the grid sampler needs a list of values for {name} (got a range)."
                fix = f"write {name}=A,B,C, or choose the sampler tpe or random."
                require(isinstance(dimension, ValueList), where, problem, fix)

    def dimensions(self) -> dict[str, Dimension]:
        """Return each setting with the values it may take, in the order they were written."""
        return {name: parse_dimension(name, text) for name, text in self.tried.items()}


class SearchQuestion(Spec, frozen=True, kw_only=True):
    """The question of `search`: the experiment all trials share, and the search itself."""

    experiment: Experiment
    search: Search

    @property
    def name(self) -> str:
        """Return the experiment's name, or "search"."""
        return self.experiment.name or "search"


def parse_goal(text: str, where: str = "--goal") -> Goal:
    """Read a goal: accuracy, loss, throughput, cost, time:loss=0.5 or cost:loss=0.5."""
    name, _, option = text.partition(":")
    names = ("accuracy", "loss", "time", "throughput", "cost")
    if name not in names:
        raise SpecError(where, f'"{text}" is not a goal.', suggest(name, names))
    fix = f"write {name}:loss=0.5."
    if not option:
        problem = "the goal time needs the loss to reach."
        require(name != "time", where, problem, "write time:loss=0.5.")
        return Goal(name=name)  # type: ignore[arg-type]  # one of the names above
    key, _, number = option.partition("=")
    problem = f"{name} takes no option {key} with a goal."
    require(key == "loss" and name in ("time", "cost"), where, problem, "leave it out.")
    value = _number(number)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise SpecError(where, f'"{number}" is not a loss.', fix)
    return Goal(name=name, loss=float(value))  # type: ignore[arg-type]


def parse_tried(texts: list[str]) -> dict[str, str]:
    """Read what `--try` was given: NAME=VALUES, once for each setting."""
    found: dict[str, str] = {}
    for text in texts:
        dashes = OPTION if text.startswith(OPTION) else ""
        name, equals, values = text.removeprefix(dashes).partition("=")
        name, values = name.strip(), values.strip()
        if not equals or not name or not values:
            fix = "write such as --try learning_rate=0.001..1:log or --try batch=32,64,128."
            raise SpecError("--try", f'"{text}" is not NAME=VALUES.', fix)
        name = dashes + name
        if name in found:
            raise SpecError("--try", f"{name} is given twice.", "write all its values at once.")
        found[name] = values
    return found


def parse_dimension(name: str, text: str) -> Dimension:
    """Read the values of one setting: a range with ".." or a list with commas."""
    where = f"--try {name}"
    match = RANGE.fullmatch(text) if ".." in text else None
    if match is None:
        if ".." in text:
            problem = f'"{text}" is not a range.'
            raise SpecError(where, problem, "write LOW..HIGH or LOW..HIGH:log.")
        return ValueList(values=_choices(name, text, where))
    low, high, scale = _number(match["low"]), _number(match["high"]), match["scale"]
    for end in (low, high):
        is_number = isinstance(end, int | float) and not isinstance(end, bool)
        if not is_number or not math.isfinite(end):  # type: ignore[arg-type]
            raise SpecError(where, f'"{end}" is not a number.', "write such as 0.001..1:log.")
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    problem = f"{low:g} is not below {high:g}."
    require(low < high, where, problem, "write the smaller number first.")
    problem = f'":{scale}" is not a scale.'
    require(scale in (None, "log"), where, problem, "write :log, or leave it out.")
    problem = f"a logarithmic range must start above zero (got {low:g})."
    require(scale != "log" or low > 0, where, problem, "write a smallest value above zero.")
    if not (isinstance(low, int) and isinstance(high, int)):
        low, high = float(low), float(high)
    return Range(low=low, high=high, log=scale == "log")


def _choices(name: str, text: str, where: str) -> tuple[Value, ...]:
    """Split a list at its commas; those between the options of an architecture do not count."""
    pieces: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        inside = name == "architecture" and "=" in piece and ":" not in piece
        if inside and pieces:
            pieces[-1] += f",{piece}"
        elif piece:
            pieces.append(piece)
    problem = f'"{text}" lists no values.'
    require(bool(pieces), where, problem, "write such as 32,64,128.")
    problem = f'"{text}" names a value twice.'
    require(len(set(pieces)) == len(pieces), where, problem, "write each value once.")
    if name == "architecture":
        for piece in pieces:
            parse_architecture(piece, where)
        return tuple(pieces)
    return tuple(_number(piece) for piece in pieces)


def _number(text: str) -> Value:
    """Return the number or the truth value that a text is, or else the text."""
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


OF_OPTIMIZER = set(Optimizer.__struct_fields__) - {"name"}


def apply(experiment: Experiment, settings: dict[str, Value]) -> Experiment:
    """Return the experiment of one trial; a SpecError names what does not fit together."""
    changes: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    own: dict[str, Value] = {}
    arguments: list[str] = []
    for name, value in settings.items():
        if name.startswith(OPTION):
            arguments += [name, str(value)]
        elif name == "architecture":
            changes[name] = parse_architecture(str(value), "--try architecture")
        elif name == "optimizer":
            optimizer["name"] = value
        elif name in OF_OPTIMIZER:
            optimizer[name] = value
        elif name.startswith(SETTING):
            own[name.removeprefix(SETTING)] = value
        else:
            changes[name] = value
    if optimizer:
        changes["optimizer"] = {**msgspec.to_builtins(experiment.workload.optimizer), **optimizer}
    if own:
        changes["settings"] = {**experiment.settings, **own}
    for one, other in (("batch", "global_batch"), ("global_batch", "batch")):
        if one in changes and getattr(experiment.workload, other):
            changes[other] = 0
    script = experiment.workload.script
    if arguments and script is not None:
        longer = msgspec.structs.replace(script, arguments=(*script.arguments, *arguments))
        changes["script"] = longer
    return replace(experiment, **changes) if changes else experiment


def check_names(question: SearchQuestion) -> None:
    """Raise SpecError for a setting that would reach nobody."""
    script = question.experiment.workload.script
    known = {*Workload.__struct_fields__, *Cluster.__struct_fields__, *OF_OPTIMIZER}
    known |= {"architecture", "optimizer"}
    known -= {"script", "resume", "hosts", "schedule"}
    require(
        bool(question.search.tried), "search", "there is nothing to try.",
        "name settings, such as --try learning_rate=0.001..1:log.",
    )  # fmt: skip
    for name in question.search.tried:
        where = f"--try {name}"
        if name.startswith(OPTION):
            problem = "a built-in workload has no command-line options of its own."
            require(script is not None, where, problem, f"write --try {name[2:]}=….")
        elif name.startswith(SETTING):
            require(
                len(name) > len(SETTING), where, "the setting has no name.", "write setting.NAME."
            )
        elif name not in known:
            fix = suggest(name, sorted(known))
            own = f"for a setting of your own code write setting.{name}"
            raise SpecError(where, "it is not a field of an experiment.", f"{fix} {own}.")
        elif script is not None and name in {
            *Workload.__struct_fields__,
            *OF_OPTIMIZER,
            "optimizer",
        }:
            problem = "a script has its own."
            raise SpecError(where, problem, f"write --try --{name}=…, or --try setting.{name}=….")


def load_search(path: Path) -> SearchQuestion:
    """Read a search file; every mistake in it is a SpecError that names the place."""
    tables = read_tables(path)
    table = tables.pop("search", None)
    if not isinstance(table, dict):
        fix = "add [search] and [search.try], or give --try."
        raise SpecError(str(path), "it has no table [search].", fix)
    return SearchQuestion(experiment=from_tables(tables, str(path)), search=search_of(table, path))


def search_of(table: dict[str, Any], where: Path | str) -> Search:
    """Build a search from a table, as TOML or flags give it."""
    known = [field.encode_name for field in msgspec.structs.fields(Search)]
    for key in table:
        if key not in known:
            raise SpecError(f"{where}, [search]", f'unknown key "{key}".', suggest(key, known))
    table = {**table, "try": {k: _as_text(v) for k, v in table.get("try", {}).items()}}
    try:
        return msgspec.convert(table, Search)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        raise SpecError(f"{where}, [search]", f"{error}.", "see docs/search.md.") from None


def _as_text(value: object) -> str:
    """Return a list of a TOML file as `--try` takes it."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def search_to_toml(question: SearchQuestion) -> str:
    """Return the question as a file that `load_search` reads back."""
    tables = msgspec.to_builtins(question)
    if question.experiment.workload.script is not None:
        workload = tables["experiment"]["workload"]
        tables["experiment"]["workload"] = {"script": workload["script"]}
    return tomli_w.dumps({**tables.pop("experiment"), **tables})
