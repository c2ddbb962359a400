"""A comparison: one experiment and the axes along which it is varied; the papers' presets too.

A comparison file is an experiment file with a table `[compare]` (the axes), and where wanted
`[[more]]` (further grids: what they replace), `[quick]` (what `--quick` replaces) and `[paper]`
(what is reproduced, and what differs).
"""

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import tomli_w

from paceline.errors import SpecError, suggest
from paceline.spec.architecture import parse_architecture
from paceline.spec.base import Spec, require
from paceline.spec.cluster import parse_link
from paceline.spec.experiment import Experiment, from_tables, read_tables, replace

S = TypeVar("S", bound=Spec)


class Axes(Spec, frozen=True, kw_only=True):
    """What is varied. An axis left out keeps the experiment's own value."""

    architectures: tuple[str, ...] = ()
    """As `--architecture` takes them: "ring", "server:placement=colocated"."""

    peers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    """A model, or "model@data" where models differ in their data."""

    batches: tuple[int, ...] = ()
    """Samples per worker: weak scaling."""

    global_batches: tuple[int, ...] = ()
    """Samples of all workers together: strong scaling."""

    workers: tuple[int, ...] = ()
    servers: tuple[int, ...] = ()
    """Only for architectures (and peers) that have servers."""

    links: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    engines: tuple[Literal["here", "tunnel", "predict"], ...] = ()
    containers: tuple[str, ...] = ()
    """As `--container` takes them; "" is bare."""

    repeats: int = 3
    check_training: bool = True
    """Lay every loss curve over `single`'s on the same global batch."""

    def __post_init__(self) -> None:
        where = "[compare]"
        problem = f"repeats = {self.repeats} is not at least 1."
        require(self.repeats >= 1, where, problem, "write 3 or more to see the noise.")
        both = "batches and global_batches are both given."
        fix = "keep one: batches are per worker, global_batches are totals."
        require(not (self.batches and self.global_batches), where, both, fix)
        for text in self.architectures:
            parse_architecture(text, f"{where}, architectures")
        for text in filter(None, self.links):
            parse_link(text, f"{where}, links")
        for name in ("workers", "batches", "global_batches"):
            low = [value for value in getattr(self, name) if value < 1]
            problem = f"{name} = {list(getattr(self, name))} has a value below 1."
            require(not low, where, problem, "write 1 or more.")


class Paper(Spec, frozen=True, kw_only=True):
    """What a preset reproduces, and how its figure is drawn."""

    paper: str
    """P1 to P5, as docs/papers.md lists them."""

    figure: str
    title: str
    differs: tuple[str, ...]
    """What is not as in the paper, in sentences."""

    kind: Literal["grid", "series", "loss", "net"] = "grid"
    """A grid of runs; time series per host; loss curves; the curve of `paceline net`."""

    x: str = "workers"
    y: tuple[str, ...] = ("samples_per_second",)
    lines: str = "architecture"
    """Which column becomes one line each."""

    panels: str = ""
    """Which column becomes one panel each."""


class Comparison(Spec, frozen=True, kw_only=True):
    """The question of `compare`."""

    experiment: Experiment
    compare: Axes = Axes()
    more: tuple[dict[str, Any], ...] = ()
    """Further grids of the same comparison, each by what it replaces in the first."""

    quick: dict[str, Any] = msgspec.field(default_factory=dict)
    paper: Paper | None = None

    @property
    def name(self) -> str:
        return self.experiment.name or "comparison"

    def quickly(self) -> "Comparison":
        """The same question, small: `[quick]` replaces axes and fields of the experiment."""
        return msgspec.structs.replace(self._with(self.quick), quick={})

    def grids(self) -> list["Comparison"]:
        """Each grid of this comparison, on its own."""
        alone = msgspec.structs.replace(self, more=())
        return [alone, *(alone._with(changes) for changes in self.more)]

    def _with(self, changes: dict[str, Any]) -> "Comparison":
        axes = {k: v for k, v in changes.items() if k in Axes.__struct_fields__}
        fields = {k: v for k, v in changes.items() if k not in Axes.__struct_fields__}
        return vary(self, fields, axes)


def load_comparison(path: Path) -> Comparison:
    """Read a comparison file; every mistake in it is a SpecError that names the place."""
    tables = read_tables(path)
    axes, quick = tables.pop("compare", {}), tables.pop("quick", {})
    more = tuple(tables.pop("more", ()))
    paper = tables.pop("paper", None)
    comparison = Comparison(
        experiment=from_tables(tables, str(path)),
        compare=_axes(axes, f"{path}, [compare]"),
        more=more,
        quick=quick,
        paper=None if paper is None else _convert(paper, Paper, f"{path}, [paper]"),
    )
    try:
        comparison.quickly().grids()
    except TypeError as error:
        where = f"{path}, [quick] or [[more]]"
        raise SpecError(where, f"{error}.", "name an axis or a field of the experiment.") from None
    return comparison


def comparison_to_toml(comparison: Comparison) -> str:
    """The comparison as a file that `load_comparison` reads back."""
    tables = msgspec.to_builtins(comparison)
    return tomli_w.dumps({**tables.pop("experiment"), **tables})


def _axes(table: dict[str, Any], where: str) -> Axes:
    return _convert(table, Axes, where)


def _convert(table: dict[str, Any], kind: type[S], where: str) -> S:
    for key in table:
        if key not in kind.__struct_fields__:
            raise SpecError(where, f'unknown key "{key}".', suggest(key, kind.__struct_fields__))
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        raise SpecError(where, f"{error}.", "see docs/compare.md.") from None


def vary(base: Comparison, fields: dict[str, Any], axes: dict[str, Any]) -> Comparison:
    """`base` with everything that was given (is not None) put in its place."""
    changes = {name: value for name, value in fields.items() if value is not None}
    varied = {name: value for name, value in axes.items() if value is not None}
    return msgspec.structs.replace(
        base,
        experiment=replace(base.experiment, **changes) if changes else base.experiment,
        compare=_axes({**msgspec.to_builtins(base.compare), **varied}, "compare"),
    )
