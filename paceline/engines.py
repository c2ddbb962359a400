"""The engines: functions that answer an experiment with a run. One table.

`here` runs real processes on this machine; `tunnel` runs the same processes on emulated hosts,
links and accelerators; `predict` runs the same protocol code on a virtual clock.
"""

import socket
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from paceline import settings, spec
from paceline.diagnose.supervision import watch
from paceline.errors import SpecError, suggest
from paceline.launch import Output, check_container, inside, invitation, mpirun, reserve
from paceline.launch.failures import check_on_loss
from paceline.launch.faults import Faults, check_faults
from paceline.launch.restarts import live
from paceline.protocol import plan
from paceline.record import RunFolder
from paceline.record.following import Progress, StepCounter, recorded


class Engine(Protocol):
    """One way to answer an experiment."""

    def __call__(
        self,
        experiment: spec.Experiment,
        path: Path,
        *,
        output: Output,
        progress: Progress,
    ) -> RunFolder:
        """Make the run folder `path` (which must not exist), run, and leave its summary in it.

        A failure is raised after the record says so.
        """


ENGINES: dict[str, str] = {
    "here": "paceline.engines:here",
    "tunnel": "paceline.tunnel.engine:tunnel",
    "predict": "paceline.predict.engine:predicted",
}


CHECKS: dict[str, str] = {
    "here": "paceline.engines:check_here",
    "tunnel": "paceline.tunnel.engine:check",
    "predict": "paceline.predict.engine:check",
}
"""What each engine calls before it writes anything."""


def run(
    experiment: spec.Experiment,
    path: Path,
    *,
    output: Output = lambda member, stream, content: None,
    progress: Progress = lambda steps: None,
) -> RunFolder:
    """Answer `experiment` with the engine it names."""
    engine: Engine = _named(experiment, ENGINES)
    settings.export(experiment.settings)
    return engine(experiment, path, output=output, progress=progress)


def check(experiment: spec.Experiment) -> None:
    """Raise what `run` would raise of the question itself, without asking it.

    What only the machine decides (rights, a container's daemon) is not looked at.
    """
    _named(experiment, CHECKS)(experiment)


def _named(experiment: spec.Experiment, table: dict[str, str]) -> Any:
    if experiment.engine not in table:
        problem = f'"{experiment.engine}" is not an engine of this version.'
        raise SpecError("--on", problem, suggest(experiment.engine, table))
    check_on_loss(experiment)
    if experiment.engine != "predict":
        mpirun.check_backend(experiment)
    module, _, name = table[experiment.engine].partition(":")
    return getattr(import_module(module), name)


def check_here(experiment: spec.Experiment) -> None:
    """Raise SpecError for what would silently not happen on this machine, or cannot work here."""
    check_faults(experiment)
    served = experiment.architecture.serves_workers
    if served is not None:
        plan.check(served, plan.written_shape(experiment))


def here(
    experiment: spec.Experiment,
    path: Path,
    *,
    output: Output,
    progress: Progress,
) -> RunFolder:
    """Real processes on this machine."""
    from paceline.session.commands import local_commands, replacement_commands

    if experiment.cluster.launcher == "ray":
        return _on_ray(experiment, path, output, progress)
    container = experiment.cluster.container
    check_container(container)
    check_here(experiment)
    folder = RunFolder.create(path, experiment)
    faults = Faults(experiment.faults, folder)

    def life() -> None:
        with (
            socket.create_server(("127.0.0.1", 0), backlog=128) as coordinator,
            reserve("127.0.0.1") as reserved,
        ):
            commands = local_commands(experiment, folder, coordinator, reserved)
            with inside(container, commands, [folder.path.absolute()]) as started:
                if container:  # worker 0 cannot inherit the socket there: it opens the port itself
                    coordinator.close()
                try:
                    watch(
                        started,
                        folder,
                        faults,
                        output=output,
                        progress=progress,
                        goes_on=experiment.cluster.goes_on,
                        replacements=() if container else replacement_commands(experiment, folder),
                    )
                finally:
                    invitation.withdraw(folder.path)

    with recorded(folder):
        live(folder, experiment.cluster.restarts, life, again=faults.new_life)
        faults.check_happened()
    return folder


def _on_ray(
    experiment: spec.Experiment,
    path: Path,
    output: Output,
    progress: Progress,
) -> RunFolder:
    """The same processes, placed on a Ray cluster."""
    from paceline.launch import ray
    from paceline.session.commands import ray_commands

    cluster = experiment.cluster
    members = cluster.workers + experiment.num_servers
    gpus = 1 if cluster.device.startswith("cuda") else 0
    with ray.placed(members, cores=cluster.threads, gpus=gpus) as placed:
        folder = RunFolder.create(path, experiment)
        commands = ray_commands(experiment, folder, placed)
        with recorded(folder):
            where = folder.path.absolute()
            tick = StepCounter(folder, progress)
            placed.supervise(commands, where, output=output, tick=tick)
    return folder
