"""The engines: functions that answer an experiment with a run. One table.

`here` runs real processes on this machine; `tunnel` runs the same processes on emulated hosts,
links and accelerators; `predict` runs the same protocol code on a virtual clock.
"""

import os
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from paceline import spec
from paceline.errors import SpecError, suggest
from paceline.launch import Output, supervise
from paceline.record import RunFolder, summarise

Progress = Callable[[int], None]
"""Called with the number of steps that are done."""


class Engine(Protocol):
    """One way to answer an experiment."""

    def __call__(
        self,
        experiment: spec.Experiment,
        path: Path,
        *,
        script: Sequence[str] = (),
        output: Output,
        progress: Progress,
    ) -> RunFolder:
        """Make the run folder `path` (which must not exist), run, and leave its summary in it.

        With `script` the workers run that command line instead of the built-in loop. A failure is
        raised after the record says so.
        """


ENGINES: dict[str, str] = {
    "here": "paceline.engines:here",
}


def run(
    experiment: spec.Experiment,
    path: Path,
    *,
    script: Sequence[str] = (),
    output: Output = lambda name, line: None,
    progress: Progress = lambda steps: None,
) -> RunFolder:
    """Answer `experiment` with the engine it names."""
    if experiment.engine not in ENGINES:
        problem = f'"{experiment.engine}" is not an engine of this version.'
        raise SpecError("--on", problem, suggest(experiment.engine, ENGINES))
    module, _, name = ENGINES[experiment.engine].partition(":")
    engine: Engine = getattr(import_module(module), name)
    return engine(experiment, path, script=script, output=output, progress=progress)


def here(
    experiment: spec.Experiment,
    path: Path,
    *,
    script: Sequence[str] = (),
    output: Output,
    progress: Progress,
) -> RunFolder:
    """Real processes on this machine."""
    from paceline.training.jobs import local_commands

    folder = RunFolder.create(path, experiment)
    with socket.socket() as coordinator, recorded(folder):
        coordinator.bind(("127.0.0.1", 0))
        coordinator.listen(128)
        commands = local_commands(experiment, folder, coordinator, script)
        supervise(commands, output=output, tick=StepCounter(folder, progress))
    return folder


class recorded:  # noqa: N801 - reads as a word in a with statement
    """Leaves the summary of what happened, however the block ends."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        summarise(self._folder, "finished" if kind is None else "failed")


class StepCounter:
    """Counts worker 0's steps from its file as it grows, and reports each change."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        self._path = folder.path / "members" / "worker0.steps.jsonl"
        self._progress, self._offset, self._steps = progress, 0, 0

    def __call__(self) -> None:
        if not self._path.exists() or os.path.getsize(self._path) == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        self._steps += new.count(b"\n")
        self._progress(self._steps)
