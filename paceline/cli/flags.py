"""Flags that several verbs share, and how they become an experiment."""

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import spec

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
On = Annotated[str | None, typer.Option("--on", help="Engine: here, tunnel or predict.")]
Link = Annotated[str | None, typer.Option(help="Rate of emulated cables: 1gbit or 1gbit,50us.")]
Device = Annotated[str | None, typer.Option(help="cpu, an emulated one such as k80, or a file.")]
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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved experiment and stop.")]
Out = Annotated[
    Path | None, typer.Option(help="Run folder to make; runs/<time>-<name> when left out.")
]


def experiment(base: spec.Experiment, flags: dict[str, Any]) -> spec.Experiment:
    """`base` with every flag that was given (is not None) put in its place."""
    given = {name: value for name, value in flags.items() if value is not None}
    if "architecture" in given:
        given["architecture"] = spec.parse_architecture(given["architecture"])
    if given.get("batch") and base.workload.global_batch:
        given["global_batch"] = 0
    if given.get("global_batch") and base.workload.batch:
        given["batch"] = 0
    return spec.replace(base, **given)
