"""`paceline observe`: record any job without changing it."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import flags

SETTINGS = {
    "context_settings": {"allow_interspersed_args": False, "ignore_unknown_options": False},
    "epilog": "Examples: paceline observe train.py --epochs 3; of several ranks: "
    "torchrun --nproc-per-node 4 -m paceline.observe train.py --epochs 3",
}


def command(
    script: Annotated[str, typer.Argument(help="A Python script, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Passed to the script, whatever they look like.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="As in `python -m`: SCRIPT is a module.")] = (
        False
    ),
    out: flags.Out = None,
) -> None:
    """Run SCRIPT as python would, and record where its time goes; it need not know Paceline."""
    from paceline.cli import console
    from paceline.errors import SpecError

    if not module and not Path(script).is_file():
        problem = "there is no such script."
        raise SpecError(script, problem, "name a Python file, or a module with -m.")
    if out is not None:
        console.check_target(out)
    folder = ["--out", str(out)] if out is not None else []
    program = ["-m", script] if module else [script]
    line = [sys.executable, "-m", "paceline.observe", *folder, *program, *(arguments or [])]
    os.execv(line[0], line)
