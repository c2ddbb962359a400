"""`paceline compare`: one workload over architectures, workers, networks and peers."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import flags

SETTINGS = {
    "epilog": "Example: paceline compare --peers ddp,tensorflow-collective --architectures "
    "ring,server --model tutorial-cnn --workers 1,2. Several architectures with options are told "
    "apart by spaces: --architectures 'ring server:mode=async,chunk=256KiB'."
}

List = Annotated[str | None, typer.Option(help="Several, with commas between.")]


def command(
    file: Annotated[
        Path | None, typer.Argument(help="An experiment file with a table 'compare'.")
    ] = None,
    architectures: Annotated[
        str | None, typer.Option(help="ring,server,… or 'ring server:mode=async,window=8'.")
    ] = None,
    peers: flags.Peers = None,
    peer_python: flags.PeerPython = None,
    model: List = None,
    data: flags.Data = None,
    data_dir: flags.DataDir = None,
    shape: Annotated[str | None, typer.Option(help="Synthetic samples: 3,64,64.")] = None,
    batch: Annotated[str | None, typer.Option(help="Samples per worker: 32,100.")] = None,
    global_batch: Annotated[str | None, typer.Option(help="Samples over all: 64,128.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each run.")] = None,
    learning_rate: flags.LearningRate = None,
    workers: Annotated[str | None, typer.Option(help="Numbers of workers: 1,2,4.")] = None,
    servers: Annotated[str | None, typer.Option(help="Numbers of dedicated servers: 1,2.")] = None,
    threads: flags.Threads = None,
    on: Annotated[str | None, typer.Option("--on", help="Engines: here,tunnel.")] = None,
    link: Annotated[str | None, typer.Option(help="Networks: '1gbit 10gbit'.")] = None,
    device: Annotated[str | None, typer.Option(help="Devices: k80,p100.")] = None,
    container: Annotated[str | None, typer.Option(help="Containers: 'bare podman:IMAGE'.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Runs of each cell; 3 when left out.")] = None,
    check: Annotated[
        bool | None, typer.Option("--check/--no-check", help="Lay loss curves over single's.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this comparison where it stopped.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use the file's table 'quick'.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what members print.")] = False,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write the page.")] = True,
    out: flags.Out = None,
    json: flags.Json = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Compare architectures, networks and peers on one workload: a table, a verdict, a page."""
    from paceline import spec
    from paceline.bench import grid
    from paceline.bench.compare import QUESTION, ComparisonFolder
    from paceline.cli import console, job, tables
    from paceline.errors import SpecError

    texts = {"architectures": architectures, "peers": peers, "model": model, "data": data}
    texts |= {"data-dir": data_dir, "on": on, "link": link, "device": device}
    for name, text in {**texts, "container": container}.items():
        if text is not None and not (text.strip() and text.isprintable()):
            problem = f"{text!r} names nothing."
            raise SpecError(f"--{name}", problem, "leave it out, or write what is meant.")
    if steps == 0 or (repeats is not None and not 1 <= repeats <= 1000):
        flag, number = ("--steps", steps) if steps == 0 else ("--repeats", repeats)
        raise SpecError(flag, f"{number} are none, or too many.", "write a number above zero.")
    pythons = flags.pythons(peer_python)
    if resume is not None:
        if not (resume / QUESTION).is_file():
            problem = f"{resume} is not a comparison's folder: it has no {QUESTION}."
            raise SpecError("--resume", problem, "name one that `paceline compare` made.")
        tables.run(ComparisonFolder.open(resume), pythons, json=json, verbose=verbose, page=page)
        return
    base = spec.load_comparison(file) if file else spec.Comparison(experiment=spec.Experiment())
    base = base.quickly() if quick else base
    fields: dict[str, object] = {
        "data": data,
        "data_dir": data_dir,
        "input_shape": flags.numbers(shape, "--shape"),
        "steps": steps,
        "threads": threads,
        "optimizer": None if learning_rate is None else {"learning_rate": learning_rate},
    }
    axes = {
        "architectures": _architectures(architectures),
        "peers": flags.words(peers),
        "models": flags.words(model),
        "batches": flags.numbers(batch, "--batch"),
        "global_batches": flags.numbers(global_batch, "--global-batch"),
        "workers": flags.numbers(workers, "--workers"),
        "servers": flags.numbers(servers, "--servers"),
        "links": None if link is None else link.split(),
        "devices": flags.words(device),
        "engines": flags.words(on),
        "containers": None if container is None else [_bare(c) for c in container.split()],
        "repeats": repeats,
        "check_training": check,
    }
    comparison = spec.vary(base, fields, axes)
    tables.check(comparison)
    engines = comparison.compare.engines or (comparison.experiment.engine,)
    for flag, given in {"--link": link, "--device": device}.items():
        if given is not None and set(engines) == {"here"}:
            problem = "it is of emulated hosts, and all runs are on this machine as it is."
            raise SpecError(flag, problem, "leave it out, or add --on tunnel.")
    for cell in grid.cells(comparison):
        if cell.refused is None:
            job.check_applies(cell.experiment)
    if file is None and not (architectures or peers):
        fix = "name --architectures or --peers, or a file with a [compare] table."
        raise SpecError("compare", "there is nothing to compare.", fix)
    if dry_run:
        console.print_question(comparison, json=json)
        return
    path = console.new_run_path(f"compare-{comparison.name}", out)
    folder = ComparisonFolder.create(path, comparison)
    tables.run(folder, pythons, json=json, verbose=verbose, page=page)


def _architectures(text: str | None) -> list[str] | None:
    """Commas part names, and options too: a piece with "=" but no ":" is the last one's option."""
    if text is None:
        return None
    found: list[str] = []
    for word in text.split():
        for piece in filter(None, word.split(",")):
            if found and "=" in piece and ":" not in piece:
                found[-1] += f",{piece}"
            else:
                found.append(piece)
    return found


def _bare(container: str) -> str:
    return "" if container == "bare" else container
