"""`paceline run`: your own script, on n workers."""

import os
import tempfile
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
    threads: flags.Threads = None,
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
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Time three steps on one worker, write this file for "
            "`predict --device FILE`, and end."
        ),
    ] = None,
    out: flags.Out = None,
    watch: flags.Watch = False,
    json: flags.Json = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Run SCRIPT as every worker of a job; the architecture is chosen here, not in the script."""
    from paceline.cli import job

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
        job.join(_asked(script, tuple(arguments or ()), module), join, given)
    experiment = flags.experiment(_asked(script, tuple(arguments or ()), module), changes)
    if profile is not None:
        given = [name for name, value in changes.items() if value and name != "threads"]
        _profile(experiment, profile, given, out, json=json)
        return
    if job.is_member(os.environ):
        job.run_as_member(experiment)
    job.start(experiment, out, json=json, watch=watch, dry_run=dry_run)


def _profile(
    experiment: "spec.Experiment", path: Path, given: list[str], out: Path | None, *, json: bool
) -> None:
    """Let one worker run until enough was seen of its steps."""
    from paceline import spec
    from paceline.cli import console, job
    from paceline.errors import SpecError
    from paceline.session.observers.script_profile import VARIABLE
    from paceline.spec.profile import load_profile
    from paceline.units import format_bytes, format_seconds

    if given:
        problem = f"--{given[0]} does not go with it: one worker is timed, here."
        raise SpecError("--profile", problem, "leave it out.")
    if path.suffix != ".json":
        raise SpecError("--profile", f"{path} is not named as a profile.", f"write {path}.json.")
    console.check_target(path, "--profile", may_exist=path.is_file())
    if path.is_file():
        _require_profile(path)
    experiment = job.resolved(spec.replace(experiment, architecture=spec.Single()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=path.parent) as folder:
        written = Path(folder) / path.name
        os.environ[VARIABLE] = str(written.absolute())
        job.train(experiment, out, json=json)
        if not written.exists():
            problem = "the script ended before its third step, so that nothing is known of it."
            raise SpecError("--profile", problem, "let it take three steps or more.")
        written.replace(path)
    found = load_profile(path)
    step, size = found.step_seconds(found.batch), format_bytes(found.parameter_bytes)
    text = f"profile in {path}: {found.batch} samples in {format_seconds(step)}, {size} to exchange"
    console.err.print(text, markup=False, soft_wrap=True)
    fix = f"paceline predict --device {path} --architecture ring --link 10gbit"
    console.err.print(f"next: {fix}", markup=False, soft_wrap=True)


def _require_profile(path: Path) -> None:
    """Raise SpecError if `path` holds something else, which the new profile would replace."""
    from paceline.errors import SpecError
    from paceline.spec.profile import load_profile

    try:
        load_profile(path)
    except SpecError as error:
        problem = f"{path} exists and is not a device profile."
        raise SpecError("--profile", problem, "name another file.") from error


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
