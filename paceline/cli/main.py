"""`paceline`: the table of verbs, and the one place where errors become messages."""

import functools
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from paceline import __version__
from paceline.errors import Interrupted, PacelineError, SpecError

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Typer carries its own copy of click, whose exceptions are not click's."""

VERBS = (
    "train",
    "run",
    "demo",
    "compare",
    "observe",
    "search",
    "explain",
    "report",
    "watch",
    "predict",
    "advise",
    "drill",
    "reproduce",
    "net",
    "profile",
    "kubernetes",
    "slurm",
    "doctor",
)
"""Each is a module here with a function `command`. They load nothing heavy until called."""

app = typer.Typer(
    name="paceline",
    help="One training script, every classic distributed architecture, "
    "and the reason it scales or doesn't.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and stop.",
    ),
) -> None:
    """Only the options before a verb; verbs are the files beside this one."""
    if context.invoked_subcommand is None:  # asking for nothing is asking for help
        typer.echo(context.get_help())


class _EndedError(Exception):
    """Carries past Typer what it would turn into an exit status without a word."""


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, whose interruption is ours to tell."""

    @functools.wraps(command)
    def call(*arguments: Any, **named: Any) -> None:
        try:
            command(*arguments, **named)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise _EndedError from error

    return call


class _Verb(TyperCommand):
    """Click takes the last of several values, and says nothing of the others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option, count in Counter(order).items():
            takes_one = isinstance(option, TyperOption) and not option.is_flag
            if count > 1 and takes_one and not option.multiple:
                problem = f"it is given {count} times, and takes one value."
                raise SpecError(max(option.opts, key=len), problem, "write it once.")
        return super().parse_args(ctx, args)


for _verb in VERBS:
    _module = import_module(f"paceline.cli.{_verb}")
    app.command(_verb, cls=_Verb, **getattr(_module, "SETTINGS", {}))(_told(_module.command))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed, 2 bad input, 130 interrupted; or as a script.

    Python's warnings are shown where somebody asked for them: PYTHONWARNINGS=default.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    try:
        status = app(args=arguments, standalone_mode=False)
    except PacelineError as error:
        fail(str(error), error.exit_status)
    except _UsageError as error:
        fail(_misuse(error), 2)
    except (_EndedError, KeyboardInterrupt, typer.Abort) as error:
        sys.exit(_say_why(error.__cause__))
    sys.exit(status or 0)


def _misuse(error: Any) -> str:
    """What is wrong with an argument, in words: Typer's own tell neither what was given nor what
    was expected where that is a number."""
    problems: list[Any] = getattr(error.__cause__, "errors", list)()
    kind = problems[0]["type"] if problems else ""
    expected = {"int_parsing": "a whole number", "float_parsing": "a number"}.get(kind)
    flag = max(getattr(getattr(error, "param", None), "opts", ()), key=len, default="")
    if expected is not None and flag:
        given = problems[0]["input"]
        return f'{flag}: "{given}" is not {expected}.\n  fix: write {expected}.'
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "paceline"
    return f"{error.format_message()}\n  fix: see `{command} --help`."


def _say_why(asked: BaseException | None) -> int:
    """Say in a line that somebody ended the command; returns the exit status."""
    if isinstance(asked, BrokenPipeError):
        # Nobody reads any more, and the interpreter must not try once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    interrupted = asked if isinstance(asked, Interrupted) else Interrupted(signal.SIGINT)
    typer.secho(str(interrupted), err=True)
    return interrupted.exit_status


def fail(message: str, status: int) -> None:
    """Say what went wrong on stderr, in red on a terminal, and exit."""
    typer.secho(f"error: {message}", err=True, fg="red" if sys.stderr.isatty() else None)
    sys.exit(status)
