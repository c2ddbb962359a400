"""`paceline advise`: which architecture, servers and settings for a goal, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from paceline.predict.advice import Advice

SETTINGS = {
    "epilog": "Example: paceline advise --model resnet50 --device k80 --link 1gbit --hosts 6 "
    "--goal cost --samples 1281167 --price 0.90"
}


def command(
    file: Annotated[Path | None, typer.Argument(help="An experiment file (TOML).")] = None,
    model: Annotated[str | None, typer.Option(help="A built-in model, or a profiled one.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per worker and step.")] = None,
    hosts: Annotated[int, typer.Option(help="How many hosts there are.")] = 4,
    per_host: Annotated[int, typer.Option(help="Devices in each of them.")] = 1,
    link: flags.Link = None,
    inside: Annotated[str | None, typer.Option(help="Between devices of a host: nvlink.")] = None,
    device: flags.Device = None,
    one_device: Annotated[
        float | None, typer.Option(help="Samples/s of one device alone; scales the profile.")
    ] = None,
    goal: Annotated[str, typer.Option(help="throughput, time or cost.")] = "throughput",
    samples: Annotated[float, typer.Option(help="For time and cost: how many samples.")] = 0.0,
    price: Annotated[float, typer.Option(help="For cost: of one host for an hour.")] = 0.0,
    json: flags.Json = False,
) -> None:
    """Rank architectures with their settings for a goal; predicted, not run."""
    from paceline import spec
    from paceline.cli import console
    from paceline.cli.predict import with_hosts
    from paceline.predict.advice import advise

    _check(goal, samples, price, hosts)
    given = {
        "model": model,
        "batch": batch,
        "link": link,
        "inside": inside,
        "device": device,
        "one_device": one_device,
        "engine": "predict",
    }
    base = spec.load(file) if file else spec.Experiment(workload=spec.Workload(data="synthetic"))
    experiment = spec.replace(flags.experiment(base, given), architecture=spec.Ring())
    found = advise(
        with_hosts(experiment, per_host),
        hosts,
        goal=goal,  # type: ignore[arg-type]
        num_samples=samples,
        host_price_per_hour=price,
    )
    if json:
        console.print_json(found)
    else:
        _show(found)


def _check(goal: str, samples: float, price: float, hosts: int) -> None:
    from paceline.errors import SpecError, suggest

    goals = ("throughput", "time", "cost")
    if goal not in goals:
        raise SpecError("--goal", f'"{goal}" is not a goal.', suggest(goal, goals))
    if goal != "throughput" and samples <= 0:
        problem = f"a {goal} needs to know for how many samples."
        raise SpecError("--samples", problem, "write --samples 1281167 for one epoch of ImageNet.")
    if goal == "cost" and price <= 0:
        raise SpecError("--price", "a cost needs a price.", "write --price 0.90 per host and hour.")
    if hosts < 1:
        raise SpecError("--hosts", f"{hosts} hosts are none.", "write how many hosts there are.")


def _show(found: "Advice") -> None:
    from rich import box
    from rich.table import Table

    from paceline.cli.console import out
    from paceline.units import format_seconds

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("architecture")
    for heading in ("workers", "servers", "samples/s", "90 % between", "time", "cost"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why not the first")
    for row in found.ranked:
        table.add_row(
            row.architecture,
            str(row.workers),
            str(row.servers or ""),
            f"{row.samples_per_second:,.4g}",
            f"{row.low:,.4g} and {row.high:,.4g}",
            format_seconds(row.seconds) if row.seconds else "",
            f"{row.cost:,.2f}" if row.cost else "",
            row.why,
        )
    out.print(table)
    first = found.ranked[0]
    out.print(f"Take {first.architecture}: limited by {first.limited_by}.", style="bold")
    for text in found.remarks:
        out.print(text, markup=False)
