"""`paceline reproduce`: the papers' experiments by name."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.spec import Comparison, Paper

SETTINGS = {"epilog": "Example: paceline reproduce p1-fig8 --quick"}


def command(
    names: Annotated[
        list[str] | None, typer.Argument(help="Experiments, as --list names them; p2 for all P2.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Every experiment, and stop.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small: minutes on two cores.")] = False,
    on: Annotated[
        str | None, typer.Option(help="Another engine than the experiment's own: predict.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where data sets already lie.")] = None,
    peers: flags.Peers = None,
    peer_python: flags.PeerPython = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what members print.")] = False,
    out: flags.Out = None,
    json: flags.Json = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Run a paper's experiment and redraw its figure from our own measurements."""
    from paceline import spec
    from paceline.bench import papers
    from paceline.cli import console
    from paceline.errors import SpecError

    if listing:
        _show_list(papers.load_all(), json)
        return
    if not names:
        raise SpecError("reproduce", "no experiment is named.", "see `paceline reproduce --list`.")
    if data_dir is not None and not (data_dir and Path(data_dir).is_dir()):
        raise SpecError("--data-dir", f"there is no folder {data_dir!r}.", "check the path.")
    pythons = flags.pythons(peer_python)
    chosen = [_sized(preset, quick, data_dir) for preset in papers.find(names)]
    if on is not None:
        chosen = [_on(preset, on) for preset in chosen]
    if peers is not None:
        flags.refuse_nothing("peers", peers)
        chosen = [spec.vary(preset, {}, {"peers": flags.words(peers)}) for preset in chosen]
    for comparison in chosen:
        _check(comparison)
    if dry_run:
        for comparison in chosen:
            console.print_question(comparison, json=json)
        return
    for comparison in chosen:
        path = console.new_run_path(comparison.name, out / comparison.name if out else None)
        _run(comparison, path, pythons, json=json, verbose=verbose)


def _on(preset: "Comparison", engine: str) -> "Comparison":
    """The preset on another engine, and its page says so."""
    import msgspec

    from paceline import spec
    from paceline.errors import SpecError, suggest

    engines = ("here", "tunnel", "predict")
    if engine not in engines:
        raise SpecError("--on", f'"{engine}" is not an engine.', suggest(engine, engines))
    moved = spec.vary(preset, {"engine": engine}, {})
    if moved.paper is None or engine == preset.experiment.engine:
        return moved
    note = f"On {engine}, where the experiment is made for {preset.experiment.engine}."
    if engine == "predict":
        note += " Nothing ran: of a node's traffic the bytes are known, not its packets or CPU."
    paper = msgspec.structs.replace(moved.paper, differs=(*moved.paper.differs, note))
    return msgspec.structs.replace(moved, paper=paper)


def _sized(preset: "Comparison", quick: bool, data_dir: str | None) -> "Comparison":
    """The preset at full size, or quick; quick needs no download where no copies are named."""
    import msgspec

    from paceline import data, spec

    sized = preset.quickly() if quick else preset
    name = sized.experiment.workload.data
    if name in data.COMPUTED:
        return sized
    if data_dir is not None:
        return spec.vary(sized, {"data_dir": str(Path(data_dir).absolute())}, {})
    if not quick or sized.paper is None:
        return sized
    instead = "shapes" if name == "cifar10" else "synthetic"
    note = f"The samples are {instead} in place of {name}: --data-dir names real copies."
    paper = msgspec.structs.replace(sized.paper, differs=(*sized.paper.differs, note))
    return msgspec.structs.replace(spec.vary(sized, {"data": instead}, {}), paper=paper)


def _show_list(presets: "Sequence[Comparison]", json: bool) -> None:
    """Every experiment with its figure and what differs from the paper."""
    import msgspec
    from rich import box
    from rich.table import Table

    from paceline.cli import console

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
    listed = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("name", "paper", "figure", "shows", "runs"):
        listed.add_column(heading, overflow="fold")
    for preset in presets:
        paper = _paper(preset)
        listed.add_row(preset.name, paper.paper, paper.figure, paper.title, _engine(preset))
    console.out.print(listed)
    console.out.print("`paceline reproduce NAME --quick` runs one in minutes.", markup=False)


def _check(comparison: "Comparison") -> None:
    """Raise for what cannot be run, before anything is."""
    from paceline.cli import tables
    from paceline.errors import SpecError

    if _paper(comparison).kind == "net":
        if comparison.compare.peers:
            problem = f"{comparison.name} measures the network, where nothing is trained."
            raise SpecError("--peers", problem, "leave it out.")
        return
    tables.check(comparison)


def _run(
    comparison: "Comparison",
    path: Path,
    pythons: "Mapping[str, str]",
    *,
    json: bool,
    verbose: bool,
) -> None:
    """Measure, print, and leave the page with the figure."""
    from paceline.bench.compare import ComparisonFolder
    from paceline.cli import console, tables

    paper = _paper(comparison)
    console.err.print(f"{paper.paper}, Figure {paper.figure}: {paper.title}", markup=False)
    for sentence in paper.differs:
        console.err.print(f"  differs: {sentence}", markup=False)
    if paper.kind == "net":
        _run_network(comparison, path, json=json)
        return
    folder = ComparisonFolder.create(path, comparison)
    tables.run(folder, pythons, json=json, verbose=verbose)


def _run_network(comparison: "Comparison", path: Path, *, json: bool) -> None:
    """The curve of `paceline net`, once for each network."""
    import msgspec

    from paceline import spec
    from paceline.bench.compare import NETWORK, ComparisonFolder
    from paceline.cli import console, tables
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
    tables.show_page(folder, folder.table())
    if json:
        console.print_json(curves)


def _paper(preset: "Comparison") -> "Paper":
    assert preset.paper is not None, f"{preset.name} has no [paper] table"
    return preset.paper


def _engine(preset: "Comparison") -> str:
    return ", ".join(preset.compare.engines) or preset.experiment.engine
