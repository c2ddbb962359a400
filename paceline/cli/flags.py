"""Flags that several verbs share, and how they become an experiment."""

import re
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import spec
from paceline.errors import SpecError

File = Annotated[Path | None, typer.Argument(help="An experiment file (TOML).")]
Model = Annotated[str | None, typer.Option(help="A built-in model, or module:function.")]
ProfiledModel = Annotated[str | None, typer.Option(help="A built-in model, or a profiled one.")]
Data = Annotated[str | None, typer.Option(help="A data set: shapes, cifar10, mnist, …")]
DataDir = Annotated[str | None, typer.Option(help="Where the data already lies.")]
Batch = Annotated[int | None, typer.Option(help="Samples per worker and step.")]
GlobalBatch = Annotated[int | None, typer.Option(help="Samples per step over all.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps.")]
LearningRate = Annotated[float | None, typer.Option("--learning-rate", "--lr")]
CheckpointEvery = Annotated[int | None, typer.Option(help="Steps between two.")]
Architecture = Annotated[
    str | None,
    typer.Option(
        "--architecture",
        "-a",
        help="name or name:key=value,…: auto, single, ring, server, average, hybrid, …",
    ),
]
Workers = Annotated[int | None, typer.Option(help="Workers that compute gradients.")]
Servers = Annotated[int | None, typer.Option(help="Dedicated servers (server architectures).")]
Threads = Annotated[int | None, typer.Option(help="Compute threads per worker.")]
On = Annotated[str | None, typer.Option("--on", help="Engine: here, tunnel or predict.")]
Link = Annotated[str | None, typer.Option(help="Rate of emulated cables: 1gbit or 1gbit,50us.")]
Inside = Annotated[str | None, typer.Option(help="Between devices of a host: nvlink.")]
Device = Annotated[str | None, typer.Option(help="cpu, an emulated one such as k80, or a file.")]
OneDevice = Annotated[
    float | None, typer.Option(help="Samples/s of one device alone; scales the profile.")
]
Price = Annotated[
    str | None,
    typer.Option(metavar="2.10/h", help="Price of one host for one hour: 2.10/h or '2.10 EUR/h'."),
]
Dilation = Annotated[float | None, typer.Option(help="Slow the tunnel by this.")]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, the rest on stderr.")
]
Launcher = Annotated[
    str | None, typer.Option(help="Who starts members: local, or ray (a Ray cluster).")
]
Restarts = Annotated[
    int | None,
    typer.Option(help="When a member is lost, start all again so often, from a checkpoint."),
]
Peers = Annotated[
    str | None, typer.Option(help="ddp, tensorflow-collective, tensorflow-server, horovod, …")
]
PeerPython = Annotated[
    list[str] | None,
    typer.Option(help="Another interpreter for peers: PYTHON, or PEER=PYTHON; repeatable."),
]
OnLoss = Annotated[
    str | None,
    typer.Option(
        "--on-loss", help="When a member is lost: stop, or continue in place where the others can."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved experiment and stop.")]
Out = Annotated[
    Path | None, typer.Option(help="Run folder to make; runs/<time>-<name> when left out.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Show the live page while it runs.")]


def words(text: str | None) -> list[str] | None:
    """What is written with commas or spaces between."""
    return None if text is None else [word for word in text.replace(" ", ",").split(",") if word]


def pythons(given: list[str] | None) -> dict[str, str]:
    """Peer -> interpreter; the empty name stands for all peers."""
    from paceline.bench.peers import peer

    found: dict[str, str] = {}
    for text in given or ():
        name, equals, python = text.partition("=")
        found[peer(name, "--peer-python").name if equals else ""] = python or text
        if not shutil.which(python or text):
            problem = f"{python or text!r} is not a program."
            raise SpecError("--peer-python", problem, "write the path of a Python interpreter.")
    return found


def numbers(text: str | None, where: str) -> list[int] | None:
    """What "1,2,4" lists; None where nothing was given."""
    if text is None:
        return None
    found = words(text) or []
    # isdecimal: "²" is a digit that is no number. Python reads no more than 4,300 of them.
    if not found or not all(word.isdecimal() and len(word) < 19 for word in found):
        raise SpecError(where, f'"{text[:40]}" is not a list of numbers.', "write 1,2,4.")
    return [int(word) for word in found]


FLAGS = {"engine": "--on"}
"""Those that are not named as the field they give."""

NOT_ZERO = ("batch", "global_batch", "steps", "epochs", "one_device")
"""In a file 0 means "left out"; who writes a flag means something."""

NOT_EMPTY = (
    "model",
    "data",
    "data_dir",
    "link",
    "inside",
    "device",
    "container",
    "resume",
    "stack",
    "peers",
)


def priced(text: str | None) -> dict[str, float | str]:
    """Return the fields of a price: "2.10/h" or "2.10 EUR/h" is for one host and one hour."""
    if text is None:
        return {}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z€$£]{0,8})\s*/\s*h\s*", text)
    if match is None or float(match[1]) <= 0:
        fix = "write such as 2.10/h or '2.10 EUR/h'."
        raise SpecError("--price", f'"{text}" is not a price of one host for one hour.', fix)
    return {"price_per_hour": float(match[1]), "currency": match[2]}


def refuse_nothing(name: str, value: Any) -> None:
    """Raise SpecError for a flag that says nothing."""
    flag = f"--{name.replace('_', '-')}"
    if name in NOT_ZERO and value == 0:
        raise SpecError(flag, "0 of it is none.", "leave it out, or write a number above zero.")
    if name in NOT_EMPTY and not str(value).strip(" ,"):
        raise SpecError(flag, "it is empty.", "leave it out, or write what is meant.")
    if isinstance(value, str) and not value.isprintable():
        problem = f"{value!r} holds a character that cannot be printed."
        raise SpecError(flag, problem, "write it on one line.")


def experiment(base: spec.Experiment, flags: dict[str, Any]) -> spec.Experiment:
    """`base` with every flag that was given (is not None) put in its place."""
    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in given.items():
        refuse_nothing(name, value)
    if "architecture" in given:
        given["architecture"] = spec.parse_architecture(given["architecture"])
    if given.get("batch") and base.workload.global_batch:
        given["global_batch"] = 0
    if given.get("global_batch") and base.workload.batch:
        given["batch"] = 0
    try:
        return spec.replace(base, **given)
    except SpecError as error:
        name = error.where.rpartition(".")[2].rpartition(" ")[2]
        if error.where.startswith("experiment, ") and name in given:
            flag = f"--{name.replace('_', '-')}"
            raise SpecError(FLAGS.get(name, flag), error.problem, error.fix) from None
        raise
