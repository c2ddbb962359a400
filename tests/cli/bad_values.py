"""Values that no option can mean, by the kind of option; and what each verb needs besides.

The options come from the commands themselves, so that a new one is tested without being listed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from paceline.cli import main

HUGE = str(10**30)

NUMBERS = {
    "words": "many",
    "nothing": "",
    "zero": "0",
    "negative": "-1",
    "infinite": "inf",
    "no number": "nan",
    "huge": HUGE,
    "a list": "1,,x",
}
TEXTS = {"nothing": "", "words": "no such thing", "a line break": "a\nb", "a colon": ":::=,"}
FILES = {"missing": "absent/x", "a folder": "folder", "below a file": "file/x", "not it": "file"}

BASE: dict[str, list[str]] = {
    "train": [],
    "run": ["--", "script.py"],
    "demo": [],
    "compare": ["--architectures", "ring,single", "--workers", "2"],
    "search": ["--try", "batch=2,4"],
    "observe": ["--", "script.py"],
    "explain": ["run"],
    "report": ["run"],
    "watch": ["run"],
    "predict": ["--model", "resnet50", "--device", "k80", "--workers", "1,2"],
    "advise": ["--model", "resnet50", "--device", "k80", "--hosts", "2"],
    "drill": [*("--kill", "worker1@2", "--workers", "2", "-a", "ring"), *("--steps", "5")],
    "reproduce": ["p1-fig8", "--quick"],
    "net": [],
    "profile": ["--model", "mnist-dnn", "--out", "profile.json"],
    "kubernetes": ["--image", "i", "--workers", "2", "--", "paceline"],
    "slurm": ["--workers", "2", "--", "paceline"],
    "doctor": [],
}

TAKEN = {
    *{("train", name, "zero") for name in ("servers", "threads", "seed", "label-smoothing")},
    *{(verb, name, "zero") for verb in ("run", "search") for name in ("servers", "threads")},
    *{(verb, "seed", kind) for verb in ("train", "search") for kind in ("negative",)},
    ("search", "seed", "zero"),
    *{(verb, "checkpoint-every", "zero") for verb in ("train", "drill")},
    *{(verb, "restarts", "zero") for verb in ("train", "run", "drill")},
    ("drill", "servers", "zero"),
    ("drill", "out", "missing"),
    ("compare", "threads", "zero"),
    *{("predict", name, "zero") for name in ("servers", "checkpoint-every")},
    *{("predict", "timeline", kind) for kind in ("missing", "not it")},
    *{("predict", "chakra", kind) for kind in ("missing", "a folder")},
    ("predict", "per-host", "zero"),
    *{("advise", name, "zero") for name in ("samples", "price")},
    *{("advise", name, "huge") for name in ("samples", "price")},
    ("kubernetes", "servers", "zero"),
    ("kubernetes", "gpus", "zero"),
    ("slurm", "servers", "zero"),
    ("slurm", "gpus", "zero"),
    ("watch", "port", "zero"),
    # Left empty they mean what leaving them out means.
    *{("slurm", name, "nothing") for name in ("partition", "time")},
    *{("kubernetes", name, "nothing") for name in ("memory",)},
    *{("explain", "link", "nothing"), ("profile", "shape", "nothing")},
    *{("doctor", name, "nothing") for name in ("hosts", "container")},
    ("predict", "workers", "nothing"),
    ("watch", "FILE", "missing"),  # a run that is about to start is waited for
    # Any words will do.
    *{("profile", "name", kind) for kind in ("words", "a colon")},
    # Folders that are made, with their parents.
    *{
        (verb, "out", "missing")
        for verb in ("train", "run", "demo", "compare", "reproduce", "report", "observe", "search")
    },
    ("report", "out", "a folder"),
    ("reproduce", "out", "a folder"),
    ("profile", "out", "missing"),
    ("profile", "out", "not it"),
    # Only for --against and --scorecard, which say so then.
    ("predict", "runs", "below a file"),
    ("predict", "runs", "not it"),
    ("predict", "runs", "missing"),
    ("predict", "runs", "a folder"),
    # Where a calibration may lie, and need not.
    *{("advise", "runs", kind) for kind in FILES},
}
"""(verb, option, kind) that is no mistake: what the option can mean after all."""


@dataclass(frozen=True)
class Case:
    verb: str
    option: str
    kind: str
    line: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.verb} {self.option}: {self.kind}"

    @property
    def takes_long(self) -> bool:
        """It would be taken, and nothing stops a prediction before it is made."""
        return self.verb in ("predict", "advise") and self.is_taken

    @property
    def is_taken(self) -> bool:
        return (self.verb, self.option, self.kind) in TAKEN


def cases() -> Iterator[Case]:
    commands: Any = typer.main.get_command(main.app)
    for verb, command in commands.commands.items():
        for parameter in command.params:
            is_option = parameter.opts[0].startswith("-") and parameter.name != "help"
            if is_option and parameter.type_descriptor.annotation is not bool:
                yield from _of_option(verb, parameter)


def _of_option(verb: str, parameter: Any) -> Iterator[Case]:
    name = max(parameter.opts, key=len)
    option, kind = name.removeprefix("--"), parameter.type_descriptor.annotation
    values = {int: NUMBERS, float: NUMBERS, Path: FILES}.get(kind, TEXTS)
    base = _without(BASE[verb], parameter.opts)
    for what, value in values.items():
        before, after = (base, []) if "--" not in base else _around(base)
        yield Case(verb, option, what, (verb, *before, name, value, *after))


def _without(base: list[str], flags: list[str]) -> list[str]:
    """The same line without an option's own value: it takes one."""
    places = [base.index(flag) for flag in flags if flag in base]
    return [*base[: places[0]], *base[places[0] + 2 :]] if places else base


def _around(base: list[str]) -> tuple[list[str], list[str]]:
    place = base.index("--")
    return base[:place], base[place:]


ARGUMENTS = {
    **dict.fromkeys(("train", "compare", "predict", "advise"), FILES),
    **dict.fromkeys(("explain", "report", "watch"), FILES),
}
"""Verbs that are given a file or a folder first."""


def argument_cases() -> Iterator[Case]:
    for verb, values in ARGUMENTS.items():
        for what, value in values.items():
            yield Case(verb, "FILE", what, (verb, value))


def surroundings(folder: Path) -> None:
    """A file, a folder and a script to be taken for something else."""
    (folder / "file").write_text("this is no table [\n")
    (folder / "folder").mkdir()
    (folder / "script.py").write_text("import paceline\n")
