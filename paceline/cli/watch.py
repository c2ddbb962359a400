"""`paceline watch`: the live page of a running job."""

import time
from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"epilog": "Example: paceline watch runs/20260101-120000-resnet50-ring-4"}


def command(
    run: Annotated[Path, typer.Argument(help="The run folder of a job, running or not.")],
    port: Annotated[int, typer.Option(help="Port on localhost; a free one when left out.")] = 0,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show the live page of RUN until ctrl-C; a run that is about to start is waited for."""
    import webbrowser

    from paceline.cli import console
    from paceline.cli.runs import open_run
    from paceline.errors import SpecError
    from paceline.report import live

    if not 0 <= port < 2**16:
        problem = f"{port} is not a port."
        raise SpecError("--port", problem, "write one up to 65535, or leave it out for a free one.")
    console.check_target(run, "RUN", may_exist=True)
    try:
        _wait_for(run)
    except KeyboardInterrupt:
        return
    address, stop = live.serve(open_run(run).path, port)
    console.out.print(f"watching {run} at {address}", soft_wrap=True)
    console.err.print("end with ctrl-C; the job goes on")
    try:
        if browser:
            webbrowser.open(address)
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return
    finally:
        stop()


def _wait_for(run: Path) -> None:
    """Return once the folder is a run's; at once for one that exists and can never be one."""
    from paceline.cli import console

    if run.exists():
        return
    console.err.print(f"waiting for {run}, which is not there yet; ctrl-C ends it", markup=False)
    while not (run / "run.json").is_file():
        time.sleep(0.2)
