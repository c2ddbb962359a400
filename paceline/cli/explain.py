"""`paceline explain`: where a run's time went, what limits it, what to do next."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from paceline.explain import Explanation

SETTINGS = {"epilog": "Example: paceline explain runs/ring-4 runs/single-1"}


def command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    baseline: Annotated[
        Path | None, typer.Argument(help="A run to compare with, such as one worker alone.")
    ] = None,
    link: Annotated[
        str, typer.Option(help="Rate of the cables, where the run does not know it: 10gbit.")
    ] = "",
    json: flags.Json = False,
) -> None:
    """Say where the time of RUN went, with the counter that proves each line."""
    from paceline.cli import console
    from paceline.explain import explain
    from paceline.record import open_folder

    found = explain(open_folder(run), open_folder(baseline) if baseline else None, link=link)
    if json:
        console.print_json(found)
        return
    _show(found)


def _show(found: "Explanation") -> None:
    from rich.table import Table

    from paceline.cli.console import out
    from paceline.units import format_seconds

    out.print(f"[bold]{found.verdict}[/bold]\n")
    step, ideal = format_seconds(found.step_seconds), format_seconds(found.ideal_seconds)
    title = f"{found.run}: a step of {found.worker} takes {step}, ideal {ideal} ({found.ideal})"
    table = Table("part", title=title, title_justify="left")
    for heading in ("time", "of the step", "lost"):
        table.add_column(heading, justify="right")
    table.add_column("proved by", overflow="fold")
    for part in found.parts:
        lost = format_seconds(part.lost_seconds) if abs(part.lost_seconds) >= 1e-6 else ""
        time, share = format_seconds(part.seconds), f"{part.fraction:.1%}"
        table.add_row(part.name, time, share, lost, part.counter)
    out.print(table)
    if found.resources:
        first = found.resources[0]
        limit = format_seconds(found.limit_seconds)
        out.print(f"limit: {first.name} ({first.counter}); no step is shorter than {limit}.")
    for cause in found.causes:
        out.print(f"cause: {cause.text}.")
    for action in found.actions:
        known = action.gain_fraction is not None
        gain = f" (predicted: {action.gain_fraction:+.0%} throughput)" if known else ""
        out.print(f"next: {action.text}{gain}.")
    if found.healthy:
        out.print("next: nothing to mend here; more workers or a faster device are what is left.")
