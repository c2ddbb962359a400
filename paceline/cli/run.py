"""`paceline run`: your own script, on n workers."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from paceline import spec

SETTINGS = {
    "context_settings": {"allow_interspersed_args": False, "ignore_unknown_options": False},
    "epilog": "Examples: paceline run -n 2 --architecture ring examples/train_paceline.py; "
    "paceline run -n 2 -m package.module --its-own-option",
}


def command(
    script: Annotated[
        str,
        typer.Argument(
            help="A Python script that calls paceline.init(), or with -m a module; "
            "or the experiment.toml of such a run."
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Passed to the script, whatever they look like.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="As in `python -m`: SCRIPT is a module.")] = (
        False
    ),
    workers: Annotated[int | None, typer.Option("-n", "--workers", help="Workers.")] = None,
    servers: flags.Servers = None,
    architecture: flags.Architecture = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads per worker.")] = None,
    on: flags.On = None,
    link: flags.Link = None,
    launcher: flags.Launcher = None,
    restarts: flags.Restarts = None,
    on_loss: flags.OnLoss = None,
    join: Annotated[
        str | None,
        typer.Option(
            "--join",
            metavar="RUN",
            help="Be one more worker of a job that runs: its run folder, or its coordinator "
            "HOST:PORT with PACELINE_KEY as there.",
        ),
    ] = None,
    out: flags.Out = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the live page while it runs.")
    ] = False,
    json: flags.Json = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Run SCRIPT as every worker of a job; the architecture is chosen here, not in the script."""
    from paceline.cli import console, training

    changes = {
        "architecture": architecture,
        "workers": workers,
        "servers": servers,
        "threads": threads,
        "engine": on,
        "link": link,
        "launcher": launcher,
        "restarts": restarts,
        "on_loss": on_loss,
    }
    if join is not None:
        beside = {"out": out, "watch": watch, "json": json, "dry-run": dry_run, "on": on}
        given = [name for name, value in {**beside, **changes}.items() if value]
        training.join(_asked(script, tuple(arguments or ()), module), join, given)
    experiment = flags.experiment(_asked(script, tuple(arguments or ()), module), changes)
    if training.is_member(os.environ):
        training.run_as_member(experiment)
    training.check_applies(experiment)
    experiment = training.resolved(experiment)
    if dry_run:
        console.print_question(experiment, json=json)
        return
    training.train(experiment, out, json=json, watch=watch)


def _asked(script: str, arguments: tuple[str, ...], module: bool) -> "spec.Experiment":
    """The experiment that the command line names, by itself or as a file."""
    from paceline import spec
    from paceline.errors import SpecError

    if module or not script.endswith(".toml"):
        path = "" if module else os.path.abspath(script)
        found = spec.Script(path=path, module=script if module else "", arguments=arguments)
        name = script.rpartition(".")[2] if module else Path(script).stem
        return spec.Experiment(name=name, workload=spec.Workload(script=found))
    experiment = spec.load(Path(script))
    if experiment.workload.script is None:
        problem = f"{script} has no [workload.script]."
        raise SpecError("SCRIPT", problem, f"run a built-in workload by `paceline train {script}`.")
    if arguments:
        fix = "write them into the file, [workload.script] arguments."
        raise SpecError("ARGUMENTS", f"given beside {script}, which holds its own.", fix)
    return experiment
