"""How a paper's experiment is run and shown: a comparison whose page opens with the figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table as RichTable

from paceline import spec
from paceline.bench.compare import NETWORK, ComparisonFolder
from paceline.cli import comparing, console
from paceline.errors import SpecError


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
    comparing.run(folder, pythons, json=json, verbose=verbose)


def _run_network(comparison: spec.Comparison, path: Path, *, json: bool) -> None:
    """The curve of `paceline net`, once for each network."""
    from paceline.tunnel import agents
    from paceline.tunnel.netpipe import SIZES_BYTES

    links = comparison.compare.links or (comparison.experiment.cluster.link,)
    sizes = list(SIZES_BYTES)
    curves = {
        link: list(agents.tunnel_pairs(2, spec.parse_link(link, "links"), sizes)) for link in links
    }
    folder = ComparisonFolder.create(path, comparison)
    content = msgspec.json.format(msgspec.json.encode(curves), indent=1)
    (path / NETWORK).write_bytes(content)
    comparing.show_page(folder, folder.table())
    if json:
        console.print_json(curves)


def _paper(preset: spec.Comparison) -> spec.Paper:
    assert preset.paper is not None, f"{preset.name} has no [paper] table"
    return preset.paper


def _engine(preset: spec.Comparison) -> str:
    return ", ".join(preset.compare.engines) or preset.experiment.engine
