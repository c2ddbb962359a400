"""`paceline predict`: a scaling curve with intervals, without running."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import flags

if TYPE_CHECKING:
    from paceline import spec
    from paceline.predict.curve import Curve
    from paceline.predict.failures import Failures
    from paceline.predict.scorecard import Score
    from paceline.predict.stacks import Stack

SETTINGS = {
    "epilog": "Example: paceline predict --model resnet50 --device v100 --batch 64 "
    "--architecture ring --per-host 8 --inside nvlink --link infiniband-edr --workers 1,8,16,64"
}


def command(
    file: flags.File = None,
    model: flags.ProfiledModel = None,
    data: Annotated[str | None, typer.Option(help="synthetic, imagefolder, …")] = None,
    batch: flags.Batch = None,
    architecture: flags.Architecture = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "1,2,4,8,16,32,64",
    servers: flags.Servers = None,
    per_host: Annotated[int, typer.Option(help="Workers, each with a device, per host.")] = 0,
    link: flags.Link = None,
    inside: flags.Inside = None,
    device: flags.Device = None,
    one_device: flags.OneDevice = None,
    stack: Annotated[
        str | None, typer.Option(help="Whose software: paceline, horovod, pytorch-ddp, …")
    ] = None,
    observed: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Take the device's times and the bytes from this observed job, or from the "
            "folder of its traces.",
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="A measured run: predict it and show the error.")
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="Measured runs of this machine, one or more: find its constants from them; "
            "predictions beside these runs use them.",
        ),
    ] = None,
    scorecard: Annotated[
        bool, typer.Option("--scorecard", help="Every prediction that was later measured.")
    ] = False,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write a step of the most workers to this file, for Perfetto."),
    ] = None,
    chakra: Annotated[
        Path | None,
        typer.Option(help="Write Chakra traces of a step of the most workers into this folder."),
    ] = None,
    mtbf: Annotated[
        str | None, typer.Option(help="Of one host, between failures: 720h. What is left of work.")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="With --mtbf: steps between checkpoints; 0 for the best.")
    ] = 0,
    runs: Annotated[Path, typer.Option(help="Where scorecard and calibration are kept.")] = Path(
        "runs"
    ),
    json: flags.Json = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Predict throughput over numbers of workers: what limits, and where more do not help."""
    from paceline import spec
    from paceline.cli import console
    from paceline.errors import SpecError
    from paceline.predict import curve
    from paceline.predict import scorecard as scores
    from paceline.predict.chakra import write_traces
    from paceline.predict.changes import vary
    from paceline.predict.model import model_of

    if scorecard:
        _show_scores(scores.read(runs), json)
        return
    if calibrate:
        _calibrate(calibrate, runs, json)
        return
    if against is not None:
        _score(against, runs, json)
        return
    if observed is not None:
        device, architecture = _of_observed(observed, device, model), architecture or "ring"
    given = {
        **of_profile(device, model, batch),
        "data": data,
        "architecture": architecture,
        "servers": servers,
        "link": link,
        "inside": inside,
        "device": device,
        "one_device": one_device,
        "stack": stack,
        "engine": "predict",
    }
    numbers = flags.numbers(workers, "--workers") or []
    if 0 in numbers:
        raise SpecError("--workers", "0 workers train nothing.", "write them with commas: 1,2,4.")
    kind = spec.parse_architecture(architecture) if architecture else spec.Auto()
    if not kind.takes_one_worker:
        given["workers"] = max(numbers)
    if not kind.is_undecided:
        model_of(kind)  # raises for an architecture that no model predicts
    if data is not None:
        check_data(data)
    base = spec.load(file) if file else spec.Experiment(workload=spec.Workload(data="synthetic"))
    experiment = with_hosts(flags.experiment(base, given), per_host)
    failures = parse_failures(mtbf, checkpoint_every)
    if timeline is not None:
        console.check_target(timeline, "--timeline", may_exist=timeline.is_file())
    if chakra is not None:
        console.check_target(chakra, "--chakra", may_exist=chakra.is_dir())
    experiment = with_choice(experiment, max(numbers))
    if dry_run:
        console.out.print(spec.to_toml(experiment), markup=False)
        return
    found = curve.scaling_curve(experiment, numbers, failures, stack_of(experiment, runs))
    if timeline is not None:
        _draw(experiment, max(numbers), timeline)
    if chakra is not None:
        files = write_traces(vary(experiment, workers=max(numbers)), chakra)
        console.err.print(f"Chakra traces: {files[0]} and {len(files) - 1} more", markup=False)
    if json:
        console.print_json(found)
    else:
        _show(found)


def _of_observed(path: Path, device: str | None, model: str | None) -> str:
    """The file with the profile of an observed job, in the place of a device."""
    from paceline.cli.runs import open_run
    from paceline.errors import SpecError
    from paceline.observe.profiling import profile_of
    from paceline.spec.profile import save_profile

    if device or model:
        problem = "the observed job is its own model and device."
        raise SpecError("--from", problem, "leave --device and --model out.")
    run = open_run(path)
    file = run.path / "observed.json"
    save_profile(profile_of(run), file)
    return str(file)


def _draw(experiment: "spec.Experiment", workers: int, path: Path) -> None:
    """Simulate once more, and write what happens when."""
    from paceline.cli import console
    from paceline.predict.answer import simulate
    from paceline.predict.changes import vary
    from paceline.predict.timeline import Timeline

    drawn = Timeline()
    simulate(vary(experiment, workers=workers), timeline=drawn)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.write(path)
    console.err.print(f"timeline of {workers} workers: {path} (open it in Perfetto)", markup=False)


def of_profile(device: str | None, model: str | None, batch: int | None) -> dict[str, object]:
    """Model and batch as given; a profile file that is given alone says both."""
    from paceline.spec.profile import load_profile

    if model is None and device is not None and device.endswith(".json"):
        profile = load_profile(Path(device))
        return {"model": profile.model, "batch": batch or profile.batch}
    return {"model": model, "batch": batch}


def check_data(name: str) -> None:
    """Loads torch, which a prediction needs for nothing else."""
    from paceline import data
    from paceline.errors import SpecError, suggest

    if name not in data.names():
        raise SpecError("--data", f'"{name}" is not a data set.', suggest(name, data.names()))


def parse_failures(mtbf: str | None, checkpoint_every: int) -> "Failures | None":
    """What `--mtbf` and `--checkpoint-every` ask for."""
    from paceline.errors import SpecError
    from paceline.predict.failures import Failures
    from paceline.units import parse_seconds

    if mtbf is None:
        if checkpoint_every:
            problem = "checkpoints cost nothing that is shown without failures."
            raise SpecError("--checkpoint-every", problem, "say --mtbf 720h too.")
        return None
    seconds = parse_seconds(mtbf, "--mtbf")
    if seconds <= 0 or checkpoint_every < 0:
        problem = f"--mtbf {mtbf} --checkpoint-every {checkpoint_every}: not above zero."
        raise SpecError("--mtbf", problem, "write a time such as 720h.")
    return Failures(mtbf_seconds=seconds, every=checkpoint_every)


def with_hosts(experiment: "spec.Experiment", per_host: int) -> "spec.Experiment":
    """Hosts of so many devices each; what an experiment file writes stays."""
    from paceline import spec
    from paceline.errors import SpecError

    if per_host < 0:
        problem = f"{per_host} workers on a host are none."
        raise SpecError("--per-host", problem, "write how many devices a host has.")
    if per_host == 0:
        return experiment
    host = spec.Host(workers=per_host)
    hosts = [host]
    if experiment.num_servers:
        hosts.append(spec.Host(count=experiment.num_servers, workers=0, servers=1))
    return spec.replace(experiment, workers=per_host, hosts=tuple(hosts))


def with_choice(experiment: "spec.Experiment", workers: int) -> "spec.Experiment":
    """`auto` is what `advise` would take on as many hosts as the most workers need."""
    from paceline import spec
    from paceline.cli import console
    from paceline.predict.advice import advise, choose, without_servers
    from paceline.predict.changes import vary

    if not experiment.architecture.is_undecided:
        return experiment
    computing = [host for host in experiment.cluster.hosts if host.workers]
    if len(computing) > 1:  # hosts that differ are asked about as they are: none may be left out
        found = choose(vary(experiment, workers=workers))
        kind, why = found or (spec.Ring(), "there is no profile to choose by")
        console.err.print(f"architecture: {spec.format_architecture(kind)}: {why}", markup=False)
        return spec.replace(experiment, architecture=kind)
    per_host = max((host.workers for host in computing), default=1)
    ring = without_servers(experiment)
    ranked = advise(ring, max(2, workers // max(1, per_host))).ranked
    several = [row for row in ranked if row.workers > 1]
    first = several[0]
    why = "as `paceline advise` ranks them"
    if first is not ranked[0]:
        why += f", of several workers; before it {ranked[0].architecture} on one"
    console.err.print(f"architecture: {first.architecture}, {why}")
    chosen = spec.parse_architecture(first.architecture)
    hosts = ring.cluster.hosts
    if first.servers and hosts:
        hosts += (spec.Host(count=first.servers, workers=0, servers=1),)
    return spec.replace(experiment, architecture=chosen, servers=first.servers, hosts=hosts)


def _show(found: "Curve") -> None:
    from rich import box
    from rich.table import Table

    from paceline.cli.console import out
    from paceline.predict.outcome import rate_text
    from paceline.units import format_seconds

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("workers", "samples/s", "90 % between", "step", "efficiency"):
        table.add_column(heading, justify="right", no_wrap=True)
    failures = found.points[-1].useful_fraction is not None
    if failures:
        table.add_column("useful", justify="right", no_wrap=True)
    idle = found.points[-1].idle_fraction is not None
    if idle:
        table.add_column("idle", justify="right", no_wrap=True)
    table.add_column("limited by")
    for point in found.points:
        table.add_row(
            str(point.workers),
            rate_text(point.samples_per_second),
            f"{rate_text(point.low)} and {rate_text(point.high)}",
            format_seconds(point.step_seconds),
            f"{point.efficiency:.0%}",
            *([f"{point.useful_fraction:.1%}"] if failures else []),
            *([f"{point.idle_fraction or 0.0:.0%}"] if idle else []),
            point.limited_by,
        )
    out.print(f"{found.architecture}, predicted", style="bold", markup=False)
    out.print(table)
    last = found.points[-1]
    if failures:
        text = f"useful: of the time, with a checkpoint every {last.checkpoint_every} steps"
        out.print(f"{text} at {last.workers} workers.", markup=False)
    if found.enough_workers < last.workers:
        enough = found.enough_workers
        more = "More than one worker does" if enough == 1 else f"More than {enough} workers do"
        text = f"{more} not help: limited by {last.limited_by}."
        out.print(text, markup=False)


def stack_of(experiment: "spec.Experiment", runs: Path) -> "Stack":
    """Whose software, with what was found about this machine; says so."""
    from paceline.cli import console
    from paceline.predict.calibration import FILE, stack_for

    found, date = stack_for(experiment, runs)
    if date:
        console.err.print(f"constants as calibrated on {date}: {runs / FILE}", markup=False)
    return found


def _calibrate(paths: list[Path], runs: Path, json: bool) -> None:
    """Find this machine's constants, and keep them."""
    from paceline.cli import console
    from paceline.cli.runs import open_run
    from paceline.predict import calibration

    found = calibration.from_runs([open_run(path) for path in paths])
    runs.mkdir(parents=True, exist_ok=True)
    calibration.save(found, runs / calibration.FILE)
    if json:
        console.print_json(found)
        return
    for name, value in found.constants.items():
        console.out.print(f"{name:18} {value:.4g}", markup=False)
    for path, error in zip(paths, found.errors, strict=True):
        console.out.print(f"{path}: predicted {error:+.1%} with these", markup=False)
    console.out.print(f"kept in {runs / calibration.FILE}, {found.date}", markup=False)


def _score(run: Path, runs: Path, json: bool) -> None:
    """Predict a measured run, show the error, and keep the pair."""
    from paceline.cli import console
    from paceline.cli.runs import open_run
    from paceline.predict import scorecard
    from paceline.predict.outcome import rate_text

    entry = scorecard.score(open_run(run))
    scorecard.keep(entry, runs)
    if json:
        console.print_json(entry)
        return
    console.out.print(f"measured   {rate_text(entry.measured)} samples/s")
    between = f"90 % between {rate_text(entry.low)} and {rate_text(entry.high)}"
    console.out.print(f"predicted  {rate_text(entry.predicted)} samples/s ({between})")
    where = "inside" if entry.inside else "outside"
    console.out.print(f"error      {entry.error_fraction:+.1%}, {where} the interval")


def _show_scores(entries: "list[Score]", json: bool) -> None:
    from statistics import median

    from rich import box
    from rich.table import Table

    from paceline.cli import console
    from paceline.predict.outcome import rate_text

    errors = [abs(entry.error_fraction) for entry in entries]
    inside = [entry.inside for entry in entries]
    if json:
        console.print_json({"entries": entries, "pairs": len(entries)})
        return
    if not entries:
        console.out.print("no prediction was measured yet: `paceline predict --against RUN`")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("time", "run", "architecture", "workers", "predicted", "measured", "error"):
        table.add_column(heading)
    for entry in entries:
        mark = "" if entry.inside else " (outside)"
        table.add_row(
            entry.time,
            entry.name,
            entry.architecture,
            str(entry.workers),
            rate_text(entry.predicted),
            rate_text(entry.measured),
            f"{entry.error_fraction:+.1%}{mark}",
        )
    console.out.print(table)
    text = f"{len(entries)} pairs: median error {median(errors):.1%}, worst {max(errors):.1%}, "
    console.out.print(f"{text}{sum(inside) / len(inside):.0%} inside their intervals")
