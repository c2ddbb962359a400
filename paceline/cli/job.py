"""One job, as `train`, `run` and `drill` start it: resolve, run, show."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline import architectures, data, engines, models, record, spec
from paceline.cli import console
from paceline.cli.streams import MemberStreams
from paceline.errors import MemberError, MissingError, SpecError, suggest
from paceline.explain import conclude
from paceline.launch import Identity, identify, invitation, parse_container
from paceline.launch.failures import check_on_loss
from paceline.launch.identity import ON_LOSS, TORCH_VARIABLES
from paceline.predict.advice import choose
from paceline.record import RunFolder, Summary, checkpoints
from paceline.record.entries import NOT_FINITE
from paceline.units import format_bytes, format_seconds

MOST_MEMBERS = 1024
"""Processes on one machine; a job of more is a mistake, or many hosts'."""


def is_member(environ: Mapping[str, str]) -> bool:
    """Whether a launcher other than ours started this very process as a member."""
    return identify(environ).launcher not in ("none", "paceline")


def stages_started(architecture: str | None, environ: Mapping[str, str]) -> int | None:
    """Workers of a pipeline that another launcher started: there is none of one, so that they are
    to be known before anything is checked. None for all others, who learn them later."""
    if not architecture or spec.parse_architecture(architecture).takes_one_worker:
        return None
    return identify(environ).workers if is_member(environ) else None


def resolved(experiment: spec.Experiment) -> spec.Experiment:
    """Check the names against the tables before anything is written, and choose for `auto`."""
    workload = experiment.workload
    if workload.script is not None:
        check_script(workload.script)
        return with_choice(experiment)
    if workload.resume:
        experiment = _going_on(experiment)
    if ":" in workload.model and not re.fullmatch(r"[\w.]+:[\w.]+", workload.model):
        problem = f'"{workload.model}" is not "module:function".'
        raise SpecError("--model", problem, "write such as package.models:network.")
    if workload.data_dir and not Path(workload.data_dir).is_dir():
        raise SpecError("--data-dir", f"there is no folder {workload.data_dir}.", "check the path.")
    described = models.info(workload.model)
    if workload.data not in data.names():
        problem = f'"{workload.data}" is not a data set.'
        raise SpecError("--data", problem, suggest(workload.data, data.names()))
    if workload.data_dir and workload.data in data.COMPUTED:
        problem = f"{workload.data} samples are computed here, and read from no folder."
        raise SpecError("--data-dir", problem, "leave it out, or name a set with --data.")
    fits = described is None or described.tokens == (workload.data == "text")
    if described is not None and not fits and workload.data != "synthetic":
        problem = f"{workload.model} cannot train on {workload.data}."
        raise SpecError("--data", problem, f"use --data {described.data} or synthetic.")
    return with_choice(experiment)


def _going_on(experiment: spec.Experiment) -> spec.Experiment:
    """The checkpoint to go on from, found once for all members; what is to be known is said."""
    run = Path(experiment.workload.resume)
    if not run.exists():
        raise SpecError("--resume", f"{run} does not exist.", checkpoints.FIX)
    found = checkpoints.choose(run)
    if run.is_dir():
        checkpoints.sweep(run)
    if found.passed_over:
        told = f"note: {' '.join(found.passed_over)} Going on from {found.path}."
        console.err.print(told, soft_wrap=True, markup=False)
    for text in checkpoints.differences(found, experiment):
        console.err.print(f"note: {text}", soft_wrap=True, markup=False)
    return spec.replace(experiment, resume=str(found.path.absolute()))


def with_choice(experiment: spec.Experiment) -> spec.Experiment:
    """Replace `auto` by a choice, and say which and why."""
    cluster = experiment.cluster
    hosts = 1 if experiment.engine == "here" else cluster.workers
    chosen, reason = architectures.resolve(
        experiment.architecture, workers=cluster.workers, hosts=hosts, gpus=_gpus()
    )
    if experiment.architecture.is_undecided:
        if hosts > 1 and (advised := choose(experiment)) is not None:
            chosen, reason = advised
        text = f"architecture: {spec.format_architecture(chosen)}, because {reason}"
        console.err.print(text, soft_wrap=True, markup=False)
    made = spec.replace(experiment, architecture=chosen)
    check_on_loss(made)
    return made


def check_applies(experiment: spec.Experiment) -> None:
    """Raise for what this engine would leave out in silence, or this machine cannot do."""
    cluster, members = experiment.cluster, experiment.cluster.workers + experiment.num_servers
    if experiment.engine != "predict" and members > MOST_MEMBERS:
        problem = f"{members} members are more than one machine starts."
        fix = f"write {MOST_MEMBERS} or fewer, or ask --on predict."
        raise SpecError("--workers", problem, fix)
    workload = experiment.workload
    if workload.cache and workload.data != "imagefolder":
        problem = f"it keeps decoded photographs, and {workload.data} has none."
        raise SpecError("--cache", problem, "leave it out, or use --data imagefolder.")
    if cluster.container:
        parse_container(cluster.container)
    if experiment.engine != "here":
        return
    emulated = {
        "--link": cluster.link,
        "--dilation": cluster.dilation != 1,
        "[[cluster.hosts]]": cluster.hosts,
        "uplink": cluster.uplink,
        "inside": cluster.inside,
    }
    for name, given in emulated.items():
        if given:
            problem = "it is of emulated hosts, and this run is on this machine as it is."
            raise SpecError(name, problem, "leave it out, or add --on tunnel.")
    if cluster.device not in ("cpu", "cuda"):
        problem = f'"{cluster.device}" is emulated, and this run computes on what is here.'
        raise SpecError("--device", problem, "leave it out, or add --on tunnel or --on predict.")
    if cluster.device == "cuda" and not _gpus():
        raise MissingError("this machine has no GPU that torch can use.", "leave --device out.")
    if workload.graph == "on" and not _gpus():
        problem = "CUDA graphs are recorded on a GPU, and this machine has none that torch can use."
        raise MissingError(problem, "leave --graph out.")
    check_gpus(experiment.architecture, cluster.workers, _gpus())


def check_gpus(kind: spec.Architecture, workers: int, gpus: int) -> None:
    """Raise where an architecture asks for GPUs that are not here, before anybody is started."""
    if kind.collective == "nccl" and workers > gpus:
        problem = f"{workers} workers share {gpus} GPUs, and NCCL needs one for each."
        fix = "leave backend out: workers that share a GPU then exchange by gloo."
        raise SpecError("--architecture", problem, fix)


def check_script(script: spec.Script) -> None:
    """Raise SpecError where there is no such program."""
    if script.path:
        path = Path(script.path)
        if not (path.is_file() or (path / "__main__.py").is_file()):
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            if path.is_dir():
                problem = f"{shown} is a folder, and holds no __main__.py."
                raise SpecError("SCRIPT", problem, "name the script in it.")
            raise SpecError("SCRIPT", f"there is no file {shown}.", "check the path.")
        return
    sys.path.insert(0, os.getcwd())  # where `python -m` looks first
    try:
        found = find_spec(script.module.partition(".")[0])
    finally:
        sys.path.pop(0)
    if found is None:
        fix = "check its name, and the folder you are in."
        raise SpecError("-m", f"there is no module {script.module}.", fix)


def start(
    experiment: spec.Experiment, out: Path | None, *, json: bool, watch: bool, dry_run: bool
) -> None:
    """Run what was asked for, with its answer printed; on a dry run print the question alone."""
    check_applies(experiment)
    if experiment.cluster.balance and experiment.cluster.workers == 1:
        problem = "it divides each batch among workers by their speed, and there is one worker."
        raise SpecError("--balance", problem, "leave it out, or ask for more --workers.")
    experiment = resolved(experiment)
    if dry_run:
        engines.check(experiment)
        console.print_question(experiment, json=json)
    else:
        train(experiment, out, json=json, watch=watch)


def train(
    experiment: spec.Experiment, out: Path | None, *, json: bool, watch: bool = False
) -> RunFolder:
    """Run an experiment and print its answer; a script keeps stdout to itself."""
    script = experiment.workload.script
    name = experiment.name or f"{experiment.workload.model}-{_short(experiment)}"
    path = console.new_run_path(name.replace(":", "-").replace("/", "-"), out)
    with _watched(path) if watch else nullcontext():
        folder = measure(experiment, path, shows_stdout=not json)
    show(folder, json, console.out if script is None else console.err)
    return folder


def measure(experiment: spec.Experiment, path: Path, *, shows_stdout: bool = False) -> RunFolder:
    """Run an experiment with its progress shown, and conclude it."""
    with _progress(experiment) as progress:
        output = MemberStreams(stdout=shows_stdout, paused=progress.paused)
        try:
            folder = engines.run(experiment, path, output=output, progress=progress)
        except MemberError as error:
            raise _as_seen(error, experiment, path) from None
    conclude(folder)
    return folder


def _as_seen(error: MemberError, experiment: spec.Experiment, path: Path) -> MemberError:
    """What a failed member leaves to be said to somebody who has seen what it printed."""
    console.err.print(f"recorded in {path}, with a log of each member", soft_wrap=True)
    alone = experiment.cluster.workers + experiment.num_servers == 1
    if alone and not error.is_sentence:  # its last words stand right above
        error.args = (f"{error.brief}.",)
    return error


def train_as_member(experiment: spec.Experiment, out: Path | None, json: bool) -> None:
    """Take part in a job that a foreign launcher started; one worker prints the answer."""
    from paceline.builtin.member import train_here
    from paceline.session.start import current

    identity = _as_started(experiment)
    experiment = spec.replace(experiment, workers=identity.workers, servers=identity.servers)
    os.environ[ON_LOSS] = experiment.cluster.on_loss
    path = out or Path("runs")
    if identity.index == 0:  # the others take its folder, which may be there before they look
        path = console.new_run_path(f"{experiment.workload.model}-{identity.launcher}", out)
    folder = train_here(resolved(experiment), path)
    if current().participants.is_speaker:
        folder.wait_for_members()
        record.summarise(folder, "finished")
        conclude(folder)
        show(folder, json)


def run_as_member(experiment: spec.Experiment) -> None:
    """Become the script, in a job that a foreign launcher started; its init() finds the rest."""
    script = experiment.workload.script
    assert script is not None, "this experiment is a script"
    identity = _as_started(experiment)
    if identity.index == 0:
        console.err.print(f"{identity.launcher} started {identity.members} members; no record.")
    os.environ.update(architectures.to_environment(experiment.architecture))
    os.environ["PACELINE_SERVERS"] = str(identity.servers)
    os.environ[ON_LOSS] = experiment.cluster.on_loss
    os.execv(sys.executable, [sys.executable, *script.line])


def join(experiment: spec.Experiment, target: str, given: Sequence[str]) -> NoReturn:
    """Become the script, as one more worker of a job that runs."""
    from paceline.session.joining import check as check_joins

    if given:
        problem = f"--{given[0]} does not go with it: a worker that joins does as the others do."
        raise SpecError("--join", problem, "leave it out.")
    script = experiment.workload.script
    assert script is not None, "this experiment is a script"
    check_script(script)
    told = invitation.to_environment(invitation.read_invitation(target, os.environ))
    newcomer = invitation.identify(told)
    assert newcomer is not None, "it was invited"
    check_joins(newcomer, script)
    foreign = (*TORCH_VARIABLES, "PACELINE_MEMBER")
    inherited = {name: value for name, value in os.environ.items() if name not in foreign}
    environment = {**inherited, **told}
    os.execve(sys.executable, [sys.executable, *script.line], environment)


def _as_started(experiment: spec.Experiment) -> Identity:
    """Who this process is among the members that the launcher started; the last are servers."""
    identity = identify(os.environ, experiment.num_servers or None)
    given = experiment.cluster.workers
    if given not in (1, identity.workers):
        problem = f"--workers {given}, but {identity.launcher} started {identity.workers} workers."
        raise SpecError("--workers", problem, "leave it out under another launcher.")
    return identity


def show(folder: RunFolder, json: bool, to: Console = console.out) -> None:
    """Print a run: JSON, or a table and where the record lies; warnings last."""
    summary = folder.summary()
    warned = ("warning", NOT_FINITE)
    warnings = [event.text for event in folder.events() if event.kind in warned]
    if json:
        console.print_json(summary)
    else:
        figures = table(summary, without=warnings)
        if figures.row_count:
            to.print(figures)
        to.print(f"recorded in {folder.path}", soft_wrap=True, markup=False)
    for text in warnings:
        console.err.print(f"warning: {text}", soft_wrap=True, markup=False)


def table(summary: Summary, without: Sequence[str] = ()) -> Table:
    """The figures of one run, with units, and its notes but for some."""
    data = f" on {summary.data}" if summary.data is not None else ""
    title = escape(f"{summary.subject}{data}: {summary.architecture}")
    grid = Table(title=title, show_header=False)
    if summary.samples_per_second is not None:
        grid.add_row("throughput", f"{summary.samples_per_second:.1f} samples/s")
    if summary.step_seconds is not None:
        step = summary.step_seconds
        spread = f"p95 {format_seconds(step.p95)}, jitter {format_seconds(step.jitter)}"
        grid.add_row("step", f"{format_seconds(step.median)} ({spread})")
    if summary.breakdown_seconds is not None:
        for phase, seconds in summary.breakdown_seconds.items():
            if seconds:
                grid.add_row(f"  {phase.replace('_', ' ')}", format_seconds(seconds))
    if summary.loss is not None:
        ends = f"{summary.loss.last:.4f}"
        if summary.loss.not_finite_from is not None:
            ends = f"not a number from step {summary.loss.not_finite_from} on"
        grid.add_row("loss", f"{summary.loss.first:.4f} → {ends}")
    if summary.accuracy is not None:
        shown = ", ".join(f"{name} {share:.2%}" for name, share in summary.accuracy.items())
        grid.add_row("accuracy", shown)
    for member in summary.members:
        cpu = f"CPU {member.cpu_fraction:.0%}" if member.cpu_fraction is not None else ""
        sent = f"sent {format_bytes(member.bytes_sent)}" if member.bytes_sent else ""
        grid.add_row(member.name, ", ".join(filter(None, (cpu, sent))))
    if summary.notes is not None:
        for text in summary.notes:
            if text not in without:
                grid.add_row("note", escape(text))
    if summary.verdict is not None:
        grid.add_row("verdict", summary.verdict)
    return grid


def _progress(experiment: spec.Experiment) -> AbstractContextManager[console.Steps]:
    """How far the steps are; a script says itself what it wants to say."""
    workload = experiment.workload
    if workload.script is not None:
        return nullcontext(console.Steps())
    num_steps = workload.steps or (None if workload.epochs else 50)
    return console.step_progress(_short(experiment), num_steps)


def _watched(path: Path) -> AbstractContextManager[None]:
    """The live page, from the moment the run folder is there."""
    from paceline.report import live

    return live.serving(path, lambda address: console.err.print(f"live page: {address}"))


def _short(experiment: spec.Experiment) -> str:
    workers = experiment.cluster.workers
    return f"{spec.architecture_name(experiment.architecture)}-{workers}"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
