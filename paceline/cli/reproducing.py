"""How a paper's experiment is run and shown: a comparison whose page opens with the figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table as RichTable

from paceline import spec
from paceline.bench.compare import ComparisonFolder
from paceline.bench.table import Table
from paceline.cli import comparing, console
from paceline.errors import SpecError
from paceline.report import page
from paceline.report.figure import add_figure, add_network
from paceline.report.write import write_csv, write_pictures


def show_list(presets: Sequence[spec.Comparison], json: bool) -> None:
    """Every experiment with its figure and what differs from the paper."""
    if json:
        console.print_json(
            [
                {
                    "name": preset.name,
                    **msgspec.to_builtins(preset.paper),
                    "engine": _engine(preset),
                }
                for preset in presets
            ]
        )
        return
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("name", "paper", "figure", "shows", "runs"):
        grid.add_column(heading, overflow="fold")
    for preset in presets:
        paper = _paper(preset)
        grid.add_row(preset.name, paper.paper, paper.figure, paper.title, _engine(preset))
    console.out.print(grid)
    console.out.print("`paceline reproduce NAME --quick` runs one in minutes.", markup=False)


def check(comparison: spec.Comparison) -> None:
    """Raise for what cannot be run, before anything is."""
    if _paper(comparison).kind == "net":
        if comparison.compare.peers:
            problem = f"{comparison.name} measures the network, where nothing is trained."
            raise SpecError("--peers", problem, "leave it out.")
        return
    comparing.check(comparison)


def run(
    comparison: spec.Comparison,
    path: Path,
    pythons: Mapping[str, str],
    *,
    json: bool,
    verbose: bool,
) -> None:
    """Measure, print, and leave the page with the figure."""
    paper = _paper(comparison)
    console.err.print(f"{paper.paper}, Figure {paper.figure}: {paper.title}", markup=False)
    for sentence in paper.differs:
        console.err.print(f"  differs: {sentence}", markup=False)
    if paper.kind == "net":
        _run_network(comparison, path, json=json)
        return
    folder = ComparisonFolder.create(path, comparison)
    table = comparing.run(folder, pythons, json=json, verbose=verbose, page=False)
    question = spec.comparison_to_toml(comparison)
    composed = page.compose(_titled(table, paper), question)
    add_figure(composed, paper, table)
    _write(composed, table, path / "report")


def _run_network(comparison: spec.Comparison, path: Path, *, json: bool) -> None:
    """The curve of `paceline net`, once for each network."""
    from paceline.tunnel import agents
    from paceline.tunnel.netpipe import SIZES_BYTES

    links = comparison.compare.links or (comparison.experiment.cluster.link,)
    sizes = list(SIZES_BYTES)
    curves = {
        link: list(agents.tunnel_pairs(2, spec.parse_link(link, "links"), sizes)) for link in links
    }
    path.mkdir(parents=True)
    content = msgspec.json.format(msgspec.json.encode(curves), indent=1)
    (path / "net.json").write_bytes(content)
    paper = _paper(comparison)
    composed = page.Page(title=paper.title, verdict=" ".join(paper.differs), tiles=[])
    composed.question = spec.comparison_to_toml(comparison)
    add_network(composed, paper, curves)
    _write(composed, None, path / "report")
    if json:
        console.print_json(curves)


def _write(composed: page.Page, table: Table | None, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    index = target / "index.html"
    index.write_text(page.render(composed), encoding="utf-8")
    if table is not None:
        write_csv(table, target / "csv")
    write_pictures(composed.charts(), composed.datasets, target / "charts")
    console.err.print(f"page: {index}")


def _titled(table: Table, paper: spec.Paper) -> Table:
    """The table under the figure's name; the verdict says what differs from the paper."""
    differs = " ".join(paper.differs)
    title = f"{paper.paper}, Figure {paper.figure}: {paper.title}"
    verdict = f"{table.verdict} What differs from the paper: {differs}"
    return msgspec.structs.replace(table, name=title, verdict=verdict)


def _paper(preset: spec.Comparison) -> spec.Paper:
    assert preset.paper is not None, f"{preset.name} has no [paper] table"
    return preset.paper


def _engine(preset: spec.Comparison) -> str:
    return ", ".join(preset.compare.engines) or preset.experiment.engine
