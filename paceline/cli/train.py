"""`paceline train`: a built-in workload, on any engine."""

import os
from typing import Annotated

import typer

from paceline.cli import flags

SETTINGS = {
    "epilog": "Example: paceline train --model tutorial-cnn --data shapes --batch 32 --steps 50 "
    "--architecture ring --workers 2 --json"
}


def command(
    file: flags.File = None,
    model: flags.Model = None,
    data: flags.Data = None,
    data_dir: flags.DataDir = None,
    batch: flags.Batch = None,
    global_batch: flags.GlobalBatch = None,
    steps: flags.Steps = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    learning_rate: flags.LearningRate = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam, adamw, …")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same result.")] = None,
    architecture: flags.Architecture = None,
    workers: flags.Workers = None,
    servers: flags.Servers = None,
    threads: flags.Threads = None,
    balance: Annotated[
        bool | None, typer.Option("--balance/--no-balance", help="Divide by measured speed.")
    ] = None,
    on: flags.On = None,
    link: flags.Link = None,
    device: flags.Device = None,
    dilation: flags.Dilation = None,
    container: Annotated[str | None, typer.Option(help="Start members inside, …")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, tf32 or bfloat16.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="Order of pictures: auto, channels-first, channels-last.")
    ] = None,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="The same as --layout channels-last.")
    ] = False,
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile")] = None,
    graph: Annotated[str | None, typer.Option(help="CUDA graphs: auto, on or off.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Backward passes per step.")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Share spread over all.")] = None,
    cache: Annotated[
        bool | None, typer.Option("--cache/--no-cache", help="Decode photographs once.")
    ] = None,
    evaluate: Annotated[bool | None, typer.Option("--evaluate/--no-evaluate")] = None,
    checkpoint_every: flags.CheckpointEvery = None,
    resume: Annotated[str | None, typer.Option(help="Go on from this run folder.")] = None,
    launcher: flags.Launcher = None,
    restarts: flags.Restarts = None,
    on_loss: flags.OnLoss = None,
    out: flags.Out = None,
    watch: flags.Watch = False,
    json: flags.Json = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Train a built-in workload and measure it."""
    from paceline import spec
    from paceline.cli import job

    base = spec.load(file) if file else spec.Experiment()
    if workers is None and base.cluster.workers == 1:
        workers = job.stages_started(architecture, os.environ)
    experiment = flags.experiment(
        base,
        {
            "model": model,
            "data": data,
            "data_dir": data_dir,
            "batch": batch,
            "global_batch": global_batch,
            "steps": steps,
            "epochs": epochs,
            "seed": seed,
            "architecture": architecture,
            "workers": workers,
            "servers": servers,
            "threads": threads,
            "balance": balance,
            "engine": on,
            "link": link,
            "launcher": launcher,
            "restarts": restarts,
            "on_loss": on_loss,
            "device": device,
            "dilation": dilation,
            "container": container,
            "precision": precision,
            "layout": "channels-last" if channels_last else layout,
            "compile": compile,
            "graph": graph,
            "accumulate": accumulate,
            "label_smoothing": label_smoothing,
            "cache": cache,
            "evaluate": evaluate,
            "checkpoint_every": checkpoint_every,
            "resume": resume,
            "optimizer": _optimizer(base.workload.optimizer, optimizer, learning_rate),
        },
    )
    if job.is_member(os.environ):
        if experiment.workload.script is not None:
            job.run_as_member(experiment)
        job.train_as_member(experiment, out, json)
        return
    job.start(experiment, out, json=json, watch=watch, dry_run=dry_run)


def _optimizer(base: object, name: str | None, learning_rate: float | None) -> object:
    import msgspec

    changes = {"name": name, "learning_rate": learning_rate}
    given = {key: value for key, value in changes.items() if value is not None}
    return {**msgspec.to_builtins(base), **given} if given else None
