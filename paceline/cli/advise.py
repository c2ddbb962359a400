"""`paceline advise`: which architecture, servers and settings for a goal, and why."""

import math
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
    file: flags.File = None,
    model: flags.ProfiledModel = None,
    batch: flags.Batch = None,
    hosts: Annotated[
        int | None, typer.Option(help="How many hosts there are; 4, or those of the file.")
    ] = None,
    per_host: Annotated[
        int | None, typer.Option(help="Devices in each of them; 1, or as in the file.")
    ] = None,
    link: flags.Link = None,
    inside: flags.Inside = None,
    device: flags.Device = None,
    one_device: flags.OneDevice = None,
    goal: Annotated[str, typer.Option(help="throughput, time or cost.")] = "throughput",
    samples: Annotated[float, typer.Option(help="For time and cost: how many samples.")] = 0.0,
    price: Annotated[float, typer.Option(help="For cost: of one host for an hour.")] = 0.0,
    runs: Annotated[Path, typer.Option(help="Where a calibration is looked for.")] = Path("runs"),
    json: flags.Json = False,
) -> None:
    """Rank architectures with their settings for a goal; predicted, not run."""
    from paceline import spec
    from paceline.cli import console
    from paceline.cli.predict import of_profile, stack_of, with_hosts
    from paceline.predict.advice import advise, without_servers

    _check(goal, samples, price, hosts, per_host)
    given = {
        **of_profile(device, model, batch),
        "link": link,
        "inside": inside,
        "device": device,
        "one_device": one_device,
        "engine": "predict",
    }
    base = spec.load(file) if file else spec.Experiment(workload=spec.Workload(data="synthetic"))
    asked = flags.experiment(base, given)
    written = sum(host.count for host in asked.cluster.hosts) if file else 0
    experiment = without_servers(asked)
    if per_host is not None:
        experiment = with_hosts(experiment, per_host)
    found = advise(
        experiment,
        hosts or written or 4,
        goal=goal,  # type: ignore[arg-type]
        num_samples=samples,
        host_price_per_hour=price,
        stack=stack_of(experiment, runs),
    )
    if json:
        console.print_json(found)
    else:
        _show(found)


def _check(
    goal: str, samples: float, price: float, hosts: int | None, per_host: int | None
) -> None:
    from paceline.errors import SpecError, suggest

    goals = ("throughput", "time", "cost")
    if goal not in goals:
        raise SpecError("--goal", f'"{goal}" is not a goal.', suggest(goal, goals))
    if goal != "throughput" and samples <= 0:
        problem = f"a {goal} needs to know for how many samples."
        raise SpecError("--samples", problem, "write --samples 1281167 for one epoch of ImageNet.")
    if goal == "cost" and price <= 0:
        raise SpecError("--price", "a cost needs a price.", "write --price 0.90 per host and hour.")
    numbers = {"--samples": samples, "--price": price}
    for flag, number in numbers.items():
        if not 0 <= number < math.inf:
            raise SpecError(flag, f"{number} is no amount.", "write a number above zero.")
    if per_host is not None and per_host < 1:
        problem = f"{per_host} devices in a host are none."
        raise SpecError("--per-host", problem, "write how many devices a host has.")
    if hosts is not None and hosts < 1:
        raise SpecError("--hosts", f"{hosts} hosts are none.", "write how many hosts there are.")


def _show(found: "Advice") -> None:
    from paceline.cli.console import out
    from paceline.predict.outcome import rate_text
    from paceline.units import format_seconds

    for number, row in enumerate(found.ranked, 1):
        members = _count(row.workers, "worker")
        members += f", {_count(row.servers, 'server')}" if row.servers else ""
        members += f", without hosts: {row.left_out}" if row.left_out else ""
        parts = [f"{rate_text(row.samples_per_second)} samples/s"]
        parts.append(f"90 % between {rate_text(row.low)} and {rate_text(row.high)}")
        if row.seconds:
            parts.append(format_seconds(row.seconds))
        if row.cost:
            parts.append(f"costs {row.cost:,.2f}")
        out.print(f"{number}. {row.architecture} on {members}", style="bold", markup=False)
        out.print(f"   {', '.join(parts)}", markup=False)
        out.print(f"   {row.why or 'limited by ' + row.limited_by}", markup=False)
    for text in found.remarks:
        out.print(text, markup=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
