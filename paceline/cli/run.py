"""`paceline run`: your own script, on n workers."""

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import flags

SETTINGS = {
    "context_settings": {"allow_interspersed_args": False, "ignore_unknown_options": False},
    "epilog": "Example: paceline run -n 2 --architecture ring examples/train_paceline.py",
}


def command(
    script: Annotated[Path, typer.Argument(help="A Python script that calls paceline.init().")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed to the script.")] = None,
    workers: Annotated[int, typer.Option("-n", "--workers", help="Workers.")] = 1,
    servers: flags.Servers = None,
    architecture: flags.Architecture = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads per worker.")] = None,
    on: flags.On = None,
    link: flags.Link = None,
    launcher: flags.Launcher = None,
    out: flags.Out = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the live page while it runs.")
    ] = False,
    json: flags.Json = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Run SCRIPT as every worker of a job; the architecture is chosen here, not in the script."""
    from paceline import spec
    from paceline.cli import console, training
    from paceline.errors import SpecError

    if not script.is_file():
        raise SpecError("SCRIPT", f"there is no file {script}.", "check the path.")
    changes = {
        "name": script.stem,
        "architecture": architecture,
        "workers": workers,
        "servers": servers,
        "threads": threads,
        "engine": on,
        "link": link,
        "launcher": launcher,
        "model": script.name,
        "data": "its own",
    }
    line = (str(script.absolute()), *(arguments or []))
    experiment = flags.experiment(spec.Experiment(), changes)
    if training.is_member(os.environ):
        training.run_as_member(experiment, line)
    experiment = training.with_choice(experiment)
    if dry_run:
        console.print_question(experiment, json=json)
        return
    training.train(experiment, out, json=json, watch=watch, script=line)
