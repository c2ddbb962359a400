"""From a comparison to its cells: every experiment to run, each with a name of its own.

Pure: decides what is run and in which order, runs nothing.
"""

import os
import re
from collections.abc import Iterator
from itertools import product

import msgspec

from paceline import spec
from paceline.bench.peers import Peer, peer
from paceline.errors import SpecError
from paceline.predict.changes import vary


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment of a grid, run as it is or by a peer."""

    key: str
    experiment: spec.Experiment
    peer: str = ""
    reference: bool = False
    """Only there to lay loss curves over; it is no row of the table and runs once."""

    refused: tuple[str, str, str] | None = None
    """Where, problem and fix: there is no such experiment, as a pipeline of one worker, and nothing
    to run."""

    wanted: str = ""
    """The architecture of a refused one."""

    @property
    def architecture(self) -> str:
        """What the table calls it: our architecture, whose software it is predicted for where that
        is not ours, or the peer's name."""
        if self.peer or self.wanted:
            return self.peer or self.wanted
        text, software = spec.format_architecture(self.experiment.architecture), self.software
        return f"{text} as {software}" if software else text

    @property
    def software(self) -> str:
        """The software stack that a prediction is of; empty for ours, and for one worker, which
        exchanges nothing."""
        experiment = self.experiment
        stack = experiment.prediction.stack
        others = experiment.engine == "predict" and stack != spec.Prediction().stack
        return stack if others and experiment.architecture != spec.Single() else ""

    @property
    def global_batch(self) -> int | None:
        """Samples per step over all workers; None where only a script knows."""
        experiment = self.experiment
        if experiment.workload.script is not None:
            return None
        return experiment.workload.global_batch_for(experiment.cluster.workers)

    @property
    def learns(self) -> bool:
        """Whether the model is really trained: an emulated device computes nothing."""
        experiment = self.experiment
        real = experiment.engine != "predict" and experiment.cluster.device == "cpu"
        return real and not self.refused


def cells(comparison: spec.Comparison) -> list[Cell]:
    """Every cell, the baseline first; combinations that mean the same are one cell.

    SpecError where none of those asked for can be run.
    """
    found: dict[str, Cell] = {}
    for one in comparison.grids():
        asked = list(_expand(one))
        wanted = [cell for cell in asked if cell.architecture != "single"]
        refused = [cell.refused for cell in wanted if cell.refused is not None]
        if refused and len(refused) == len(wanted):
            raise SpecError(*refused[0])
        for cell in asked:
            found.setdefault(cell.key, cell)
    if not found:
        fix = "name architectures or peers, and workers that fit them."
        raise SpecError("compare", "there is nothing to run.", fix)
    if comparison.compare.check_training:
        for cell in list(found.values()):
            if cell.learns:
                reference = single_like(cell)
                found.setdefault(reference.key, reference)
    return list(found.values())


def schedule(cells: list[Cell], repeats: int) -> Iterator[tuple[int, Cell]]:
    """The order of runs: repeats interleaved, so that noise hits all cells alike. A prediction is
    the same each time, and made once."""
    for repeat in range(repeats):
        for cell in cells:
            once = cell.reference or cell.experiment.engine == "predict"
            if repeat == 0 or not once:
                yield repeat, cell


def single_like(cell: Cell) -> Cell:
    """The cell that trains the same global batch on one worker, here."""
    alone = _alone(cell.experiment, cell.global_batch or 0, engine="here", link="", container="")
    return msgspec.structs.replace(_cell(alone), reference=True)


def baseline_like(cell: Cell) -> Cell:
    """The cell that speed-up is measured against: one worker, the same device and workload."""
    workload = cell.experiment.workload
    return _cell(_alone(cell.experiment, workload.global_batch or workload.batch))


def _alone(experiment: spec.Experiment, batch: int, **changes: object) -> spec.Experiment:
    """The experiment on one worker of the same kind."""
    one = {"workers": 1, "servers": 0, "shares": (), "hosts": ()}
    sizes = {"batch": batch, "global_batch": 0}
    return spec.replace(experiment, architecture=spec.Single(), **one, **sizes, **changes)


def _expand(comparison: spec.Comparison) -> Iterator[Cell]:
    axes, base = comparison.compare, _with_threads(comparison)
    architectures = axes.architectures or (
        () if axes.peers else (spec.format_architecture(base.architecture),)
    )
    for experiment in _surroundings(base, axes):
        workload = experiment.workload
        yield _cell(_alone(experiment, workload.global_batch or workload.batch))
        for text, workers in product(architectures, axes.workers or (base.cluster.workers,)):
            yield from _ours(experiment, spec.parse_architecture(text), workers, axes)
        for name, workers in product(axes.peers, axes.workers or (base.cluster.workers,)):
            yield from _theirs(experiment, peer(name), workers, axes)


def _surroundings(base: spec.Experiment, axes: spec.Axes) -> Iterator[spec.Experiment]:
    """All that is the same for every architecture: workload, network, device, engine."""
    workload, cluster = base.workload, base.cluster
    models = axes.models or (f"{workload.model}@{workload.data}",)
    batches: list[dict[str, int]] = [{"batch": size, "global_batch": 0} for size in axes.batches]
    batches += [{"batch": 0, "global_batch": size} for size in axes.global_batches]
    for model, batch, link, device, engine, container in product(
        models,
        batches or [{}],
        axes.links or (cluster.link,),
        axes.devices or (cluster.device,),
        axes.engines or (base.engine,),
        axes.containers or (cluster.container,),
    ):
        name, _, data = model.partition("@")
        yield spec.replace(
            base,
            architecture=spec.Auto(),
            model=name,
            data=data or workload.data,
            link=link if engine != "here" else "",
            device=device if engine != "here" else "cpu",
            engine=engine,
            container=container,
            **batch,
        )


def _ours(
    experiment: spec.Experiment, architecture: spec.Architecture, workers: int, axes: spec.Axes
) -> Iterator[Cell]:
    if architecture == spec.Single():
        return  # there already, as the baseline
    asked = axes.servers or (experiment.cluster.servers or 1,)
    for servers in asked if architecture.takes_servers else (0,):
        changes = {"workers": workers, "servers": servers}
        try:
            yield _cell(vary(experiment, architecture=architecture, **changes))
        except SpecError as error:
            text = spec.format_architecture(architecture)
            cell = _cell(vary(experiment, **changes), wanted=text)
            yield msgspec.structs.replace(cell, refused=(error.where, error.problem, error.fix))


def _theirs(
    experiment: spec.Experiment, peer: Peer, workers: int, axes: spec.Axes
) -> Iterator[Cell]:
    if peer.one_worker_only and workers > 1:
        return
    asked = axes.servers or (experiment.cluster.servers or 1,)
    for servers in asked if peer.takes_servers else (0,):
        changed = spec.replace(experiment, architecture=peer.like, workers=workers, servers=servers)
        yield _cell(changed, peer.name)


def _with_threads(comparison: spec.Comparison) -> spec.Experiment:
    """Every worker of the grid gets the same compute, however many there are: it is one device."""
    base = comparison.experiment
    if base.cluster.threads:
        return base
    most = max(comparison.compare.workers or (base.cluster.workers,))
    return spec.replace(base, threads=max(1, len(os.sched_getaffinity(0)) // most))


def _cell(experiment: spec.Experiment, peer: str = "", wanted: str = "") -> Cell:
    workload, cluster = experiment.workload, experiment.cluster
    made = Cell(key="", experiment=experiment, peer=peer, wanted=wanted)
    total = f"g{workload.global_batch}" if workload.global_batch else f"b{workload.batch or 32}"
    script = workload.script
    parts = [
        *((workload.model, workload.data, total) if script is None else (str(script),)),
        made.architecture,
        f"w{cluster.workers}",
        f"s{experiment.num_servers}" if experiment.num_servers else "",
        experiment.engine if experiment.engine != "here" else "",
        cluster.link if experiment.engine != "here" else "",
        cluster.device if cluster.device != "cpu" else "",
        cluster.container,
    ]
    key = re.sub(r"[^A-Za-z0-9.=+-]+", "_", "-".join(filter(None, parts)))
    named = spec.replace(experiment, name=key)
    return msgspec.structs.replace(made, key=key, experiment=named)
