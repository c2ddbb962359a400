"""`paceline report`: a page of runs or of a comparison, and exports for other tools."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.record import RunFolder

SETTINGS = {"epilog": "Example: paceline report runs/single-1 runs/ring-2 --out page"}


def command(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or one comparison's folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; `report` beside the first run's files.")
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            help="trace, tensorboard, mllog or csv in place of the page; may be repeated."
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one page that needs no network: verdict, charts (also as SVG and PNG), tables, CSV."""
    import webbrowser

    from paceline.cli.console import check_target
    from paceline.cli.console import out as console
    from paceline.report.exports import export as export_run

    target = out or folders[0] / ("exports" if export else "report")
    if out is not None or folders[0].is_dir():
        check_target(target, may_exist=target.is_dir())
    if export:
        for run in _runs(folders):
            for kind in ",".join(export).split(","):
                for file in export_run(kind, run, target / kind):
                    console.print(str(file), soft_wrap=True)
        return
    index = _page(folders, target)
    console.print(f"page: {index}", soft_wrap=True)
    if browser:
        webbrowser.open(index.resolve().as_uri())


def _page(folders: list[Path], target: Path) -> Path:
    from paceline import report
    from paceline.bench.compare import QUESTION, ComparisonFolder
    from paceline.cli import tables

    if len(folders) > 1 or not (folders[0] / QUESTION).is_file():
        return report.write_runs(_runs(folders), target)
    folder = ComparisonFolder.open(folders[0])
    return tables.write_page(folder, folder.table(), target)


def _runs(folders: list[Path]) -> "list[RunFolder]":
    from paceline.cli.runs import open_run

    return [open_run(folder) for folder in folders]
