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
    from paceline.cli.runs import open_run
    from paceline.explain import explain

    found = explain(open_run(run), open_run(baseline) if baseline else None, link=link)
    if json:
        console.print_json(found)
        return
    _show(found)


def _show(found: "Explanation") -> None:
    from rich import box
    from rich.table import Table

    from paceline.cli.console import out
    from paceline.units import format_seconds

    out.print(found.verdict, style="bold", markup=False)
    step, ideal = format_seconds(found.step_seconds), format_seconds(found.ideal_seconds)
    title = f"\n{found.run}: a step of {found.worker} takes {step}, ideal {ideal} ({found.ideal})"
    out.print(title, markup=False)
    table = Table("part", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("time", "share", "lost"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("proved by", overflow="fold")
    for part in found.parts:
        lost = format_seconds(part.lost_seconds) if abs(part.lost_seconds) >= 1e-6 else ""
        time, share = format_seconds(part.seconds), f"{part.fraction:.1%}"
        table.add_row(part.name, time, share, lost, part.counter)
    out.print(table)
    lines = [f"cause  {cause.text}." for cause in found.causes]
    if found.resources:
        first = found.resources[0]
        limit = format_seconds(found.limit_seconds)
        lines.append(f"limit  {first.name} ({first.counter}); no step is shorter than {limit}.")
    for action in found.actions:
        known = action.gain_fraction is not None
        gain = f" (predicted: {action.gain_fraction:+.0%} throughput)" if known else ""
        lines.append(f"next   {action.text}{gain}.")
    if found.healthy:
        lines.append("next   nothing to mend; more workers or a faster device are what is left.")
    for line in lines:
        out.print(line, markup=False)
