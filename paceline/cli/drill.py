"""`paceline drill`: let members fail at a step, and see what it costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from paceline import spec
    from paceline.bench.drill import DrillScore

SETTINGS = {
    "epilog": "Example: paceline drill --model mnist-cnn --architecture ring --workers 2 "
    "--steps 100 --checkpoint-every 20 --kill worker1@50 --pause worker0@80:2s"
}

Several = Annotated[list[str] | None, typer.Option(help="MEMBER@STEP; repeatable.")]
Lasting = Annotated[list[str] | None, typer.Option(help="MEMBER@STEP:SECONDS; repeatable.")]


def command(
    file: flags.File = None,
    kill: Several = None,
    pause: Lasting = None,
    cut: Annotated[
        list[str] | None, typer.Option(help="MEMBER@STEP:SECONDS off the network (tunnel).")
    ] = None,
    slow: Annotated[
        list[str] | None, typer.Option(help="MEMBER@STEP:FACTORx, an emulated device (tunnel).")
    ] = None,
    restarts: Annotated[
        int | None, typer.Option(help="Start again so often; left out, as many as are killed.")
    ] = None,
    on_loss: flags.OnLoss = None,
    model: flags.Model = None,
    data: Annotated[str | None, typer.Option(help="A data set: shapes, mnist, …")] = None,
    batch: flags.Batch = None,
    global_batch: flags.GlobalBatch = None,
    steps: flags.Steps = None,
    checkpoint_every: flags.CheckpointEvery = None,
    architecture: flags.Architecture = None,
    workers: flags.Workers = None,
    servers: flags.Servers = None,
    on: flags.On = None,
    link: flags.Link = None,
    device: flags.Device = None,
    dilation: flags.Dilation = None,
    out: flags.Out = None,
    json: flags.Json = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Run a workload undisturbed and with faults, and score how it recovers."""
    from paceline import engines, spec
    from paceline.cli import console, job

    base = spec.load(file) if file else spec.Experiment()
    asked = flags.experiment(
        base,
        {
            "model": model,
            "data": data,
            "batch": batch,
            "global_batch": global_batch,
            "steps": steps,
            "checkpoint_every": checkpoint_every,
            "architecture": architecture,
            "workers": workers,
            "servers": servers,
            "engine": on,
            "link": link,
            "device": device,
            "dilation": dilation,
            "on_loss": on_loss,
        },
    )
    faults = [
        *(spec.parse_fault("kill", text) for text in kill or ()),
        *(spec.parse_fault("pause", text) for text in pause or ()),
        *(spec.parse_fault("cut", text) for text in cut or ()),
        *(spec.parse_fault("slow", text) for text in slow or ()),
    ]
    job.check_applies(asked)
    asked = _disturbed(job.resolved(asked), faults, restarts)
    engines.check(asked)
    if dry_run:
        console.print_question(asked, json=json)
        return
    found = _run(asked, console.new_run_path("drill", out))
    if json:
        console.print_json(found)
    else:
        _print(found)


def _disturbed(
    experiment: "spec.Experiment", faults: "list[spec.Fault]", restarts: int | None
) -> "spec.Experiment":
    from paceline import spec
    from paceline.bench.drill import with_faults
    from paceline.errors import SpecError

    disturbed = with_faults(experiment, faults)
    if not disturbed.faults:
        raise SpecError("drill", "no fault is asked for.", "add --kill worker1@50 or --pause …")
    if not disturbed.workload.steps:
        raise SpecError("drill", "steps are not given.", "add --steps 100.")
    kills = sum(fault.kind == "kill" for fault in disturbed.faults)
    needed = 0 if disturbed.cluster.goes_on else kills
    allowed = restarts if restarts is not None else disturbed.cluster.restarts or needed
    return spec.replace(disturbed, restarts=allowed)


def _run(disturbed: "spec.Experiment", out: Path) -> "DrillScore":
    """Both runs, into folders inside `out`."""
    from paceline import spec
    from paceline.bench.drill import score
    from paceline.cli import console, job

    undisturbed = spec.replace(disturbed, faults=(), restarts=0)
    folders = []
    for name, experiment in (("undisturbed", undisturbed), ("disturbed", disturbed)):
        console.err.print(f"{name}:")
        folders.append(job.measure(experiment, out / name))
    console.err.print(f"recorded in {out}", soft_wrap=True, markup=False)
    return score(*folders)


def _print(found: "DrillScore") -> None:
    from rich.table import Table

    from paceline.cli import console
    from paceline.units import format_seconds

    grid = Table(title=f"{found.architecture}, {found.workers} workers")
    for name in ("fault", "at step", "back after", "steps done again", "a plain restart"):
        grid.add_column(name)
    for cost in found.costs:
        back = "never" if cost.back_seconds is None else format_seconds(cost.back_seconds)
        plain = cost.plain_restart_seconds
        grid.add_row(
            cost.fault,
            str(cost.step),
            back + (", by a restart" if cost.restarted else ""),
            str(cost.undone_steps),
            "unknown" if plain is None else format_seconds(plain),
        )
    console.out.print(grid)
    longer = found.disturbed_seconds - found.undisturbed_seconds
    undisturbed = format_seconds(found.undisturbed_seconds)
    console.out.print(f"The steps took {format_seconds(longer)} longer than {undisturbed}.")
    if found.loss_difference is not None:
        verdict = "is that" if found.same_loss else "is NOT that"
        far = f"largest difference {found.loss_difference:.1e}"
        console.out.print(f"The loss {verdict} of the undisturbed run ({far}).")
