"""From the runs of a comparison to its rows, and the sentence above them. Reads records only.

What a run did not measure is absent from its row.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import msgspec

from paceline import record
from paceline.bench.grid import Cell, baseline_like, single_like
from paceline.bench.peers import PEERS
from paceline.bench.statistics import Estimate, estimate, overlap
from paceline.record import RunFolder, Summary

SAME_TRAINING = 1e-3
"""Largest relative difference of two losses that float32 rounding explains in the first steps."""

ROUNDED_STEPS = 40
"""After so many, a model that learns fast has made rounding large: 5e-8 at first, 2e-4 after 40
steps of Adam, 4e-2 after 66. From there on means over as many steps are compared, more loosely."""

SAME_LATER = 0.1

WITHOUT_PAUSES = 0.98
"""A throughput this near to that of the steps alone had no pauses worth a column."""

FORMAT_VERSION = 1

ENGINE_WORDS = {"here": "on this machine", "tunnel": "on emulated hosts", "predict": "as predicted"}


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One cell, over all its repeats."""

    cell: str
    architecture: str
    """Ours as typed, or the peer's name."""

    name: str = ""
    """What the user called the run, where rows are runs of their own."""

    baseline: str | None = None
    """The cell that speed-up is against; every verdict about this row is made beside it."""

    workers: int
    servers: int
    engine: str
    script: str | None = None
    """The user's own program; then the next four are not known."""

    model: str | None = None
    data: str | None = None
    batch: int | None = None
    """Samples per worker."""

    global_batch: int | None = None
    peer: bool = False
    link: str | None = None
    device: str | None = None
    container: str | None = None
    versions: dict[str, str] | None = None
    repeats: int = 0
    samples_per_second: Estimate | None = None
    samples_per_second_with_pauses: float | None = None
    """Where evaluation, checkpoints or the script's own pauses took time."""

    speedup: float | None = None
    """Against `single` on the same device and batch."""

    efficiency: float | None = None
    step_seconds: float | None = None
    jitter_seconds: float | None = None
    exchange_exposed_seconds: float | None = None
    breakdown_seconds: dict[str, float] | None = None
    cpu_fraction: float | None = None
    """Cores busy over all members."""

    bytes_per_step: float | None = None
    """Sent by all members together, from the first measured step on."""

    memory_bytes_per_step: float | None = None
    """Gradients that moved through shared memory, where no link carries them."""

    packets_per_step: float | None = None
    max_rss_bytes: int | None = None
    """Over all members; memory that members share is counted for each."""

    epoch_seconds: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    not_finite_from: int | None = None
    """The first step whose loss was infinite or not a number; `loss_last` is absent then."""

    accuracy: dict[str, float] | None = None
    staleness: dict[str, float] | None = None
    trains_like_single: bool | None = None
    loss_difference: float | None = None
    """Largest relative difference from `single`'s loss of the same step; absent where one of them
    is not a number."""

    verdict: str | None = None
    failed: str | None = None
    """Why there are no figures."""

    runs: list[str] = msgspec.field(default_factory=list)

    @property
    def subject(self) -> str:
        """What was run, in a word: the script, or the model."""
        return self.script or self.model or ""


class Table(msgspec.Struct, kw_only=True):
    """The answer of a comparison."""

    format_version: int
    name: str
    rows: list[Row]
    verdict: str


def tabulate(
    name: str,
    cells: Sequence[Cell],
    finished: Mapping[str, Sequence[Path]],
    reasons: Mapping[str, str],
) -> Table:
    """Rows in the order of the cells; references leave none."""
    runs = {key: [RunFolder(path) for path in paths] for key, paths in finished.items()}
    rows = [
        _row(cell, runs.get(cell.key, []), reasons.get(cell.key))
        for cell in cells
        if not cell.reference
    ]
    by_key = {row.cell: row for row in rows}
    for cell in cells:
        if not cell.reference:
            row = by_key[cell.key]
            add_speedup(row, by_key.get(baseline_like(cell).key))
            if cell.learns:
                _add_training(row, runs.get(cell.key, []), runs.get(single_like(cell).key, []))
    return Table(format_version=FORMAT_VERSION, name=name, rows=rows, verdict=verdict(rows))


def _row(cell: Cell, runs: Sequence[RunFolder], reason: str | None) -> Row:
    experiment = cell.experiment
    workload, cluster = experiment.workload, experiment.cluster
    row = Row(
        cell=cell.key,
        architecture=cell.architecture,
        peer=bool(cell.peer),
        script=None if workload.script is None else str(workload.script),
        model=workload.model or None,
        data=workload.data or None,
        batch=cell.global_batch // cluster.workers if cell.global_batch else None,
        global_batch=cell.global_batch,
        workers=cluster.workers,
        servers=experiment.num_servers,
        engine=experiment.engine,
        link=cluster.link or None,
        device=cluster.device,
        container=cluster.container or None,
        repeats=len(runs),
        failed=None if runs else reason or "not run yet",
        runs=[str(run.path) for run in runs],
    )
    if runs:
        _add_figures(row, [run.summary() for run in runs])
    return row


def _add_figures(row: Row, summaries: Sequence[Summary]) -> None:
    rates = [s.samples_per_second for s in summaries if s.samples_per_second is not None]
    steps = [s.step_seconds for s in summaries if s.step_seconds is not None]
    row.samples_per_second = estimate(rates) if rates else None
    if steps:
        row.step_seconds = median(step.median for step in steps)
        row.jitter_seconds = median(step.jitter for step in steps)
    parts = [s.breakdown_seconds for s in summaries if s.breakdown_seconds is not None]
    if parts and parts[0]:
        row.breakdown_seconds = {p: median(part.get(p, 0.0) for part in parts) for p in parts[0]}
        row.exchange_exposed_seconds = row.breakdown_seconds.get("exchange_exposed")
    row.cpu_fraction = _median(_total(s, "cpu_fraction") for s in summaries)
    row.bytes_per_step = _median(_per_step(s, "bytes") for s in summaries)
    row.packets_per_step = _median(_per_step(s, "packets") for s in summaries)
    row.memory_bytes_per_step = _median(_in_memory(s) for s in summaries)
    overall = _median(s.samples_per_second_with_pauses for s in summaries)
    if overall is not None and rates and overall < WITHOUT_PAUSES * median(rates):
        row.samples_per_second_with_pauses = overall
    memory = _median(_total(s, "max_rss_bytes") for s in summaries)
    row.max_rss_bytes = None if memory is None else int(memory)
    row.epoch_seconds = _median(s.epoch_seconds for s in summaries)
    last = summaries[-1]
    if last.loss is not None:
        row.loss_first, row.not_finite_from = last.loss.first, last.loss.not_finite_from
        row.loss_last = None if math.isnan(last.loss.last) else last.loss.last
    row.accuracy = last.accuracy
    row.staleness = last.staleness
    row.verdict = last.verdict
    if row.peer and last.members:
        wanted = PEERS[row.architecture].packages
        known = last.members[0].versions
        row.versions = {name: known[name] for name in wanted if name in known}


def add_speedup(row: Row, baseline: Row | None) -> None:
    """Put a row beside one worker's; the baseline itself has a speed-up of one."""
    if baseline is not None and baseline is not row and baseline.failed is None:
        row.baseline = baseline.cell
    if row.samples_per_second and baseline is not None and baseline.samples_per_second:
        row.speedup = _rate(row) / _rate(baseline)
        row.efficiency = row.speedup / row.workers


def _add_training(row: Row, runs: Sequence[RunFolder], references: Sequence[RunFolder]) -> None:
    if not runs or not references:
        return
    difference = loss_difference(runs[0], references[0])
    if difference is not None:
        row.loss_difference = difference if math.isfinite(difference) else None
        row.trains_like_single = difference <= SAME_TRAINING


def loss_difference(run: RunFolder, reference: RunFolder) -> float | None:
    """Largest relative difference of early losses of the same step; None where none are known.

    Infinite where either is not a number: that is no loss to train like.
    """
    own, expected = record.losses_of(run), record.losses_of(reference)
    common = own.keys() & expected.keys()
    if not common:
        return None
    if not all(math.isfinite(own[step]) and math.isfinite(expected[step]) for step in common):
        return math.inf
    steps = sorted(common)
    differences = [abs(own[s] - expected[s]) / max(abs(expected[s]), 1e-12) for s in steps]
    early = max(differences[:ROUNDED_STEPS])
    later = [steps[n : n + ROUNDED_STEPS] for n in range(ROUNDED_STEPS, len(steps), ROUNDED_STEPS)]
    for window in later:
        ours, theirs = fmean(own[s] for s in window), fmean(expected[s] for s in window)
        difference = abs(ours - theirs) / max(abs(theirs), 1e-12)
        if difference > SAME_LATER:
            return max(early, difference)
    return early


def verdict(rows: Sequence[Row]) -> str:
    """A line per setting: which is fastest, by how much, and whether it trains the same."""
    settings: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.samples_per_second is not None:
            settings.setdefault(_setting(row, rows), []).append(row)
    if not settings:
        return "Nothing could be measured; the rows say why."
    if len(settings) == 1:
        return f"Fastest: {_fastest(next(iter(settings.values())), rows)}."
    told = _telling(list(settings))
    return "\n".join(
        f"Fastest {' '.join(filter(None, (where[place] for place in told)))}: "
        f"{_fastest(own, rows)}."
        for where, own in settings.items()
    )


def _setting(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """What rows must share to be compared, in the order in which it is said."""
    strong = len({row.global_batch for row in rows}) < len({row.batch for row in rows})
    return (
        ENGINE_WORDS[row.engine],
        f"at {row.link}" if row.link else "",
        f"with {row.subject}",
        f"on {row.data}" if row.data else "",
        f"with {row.device}" if row.device else "",
        f"at batch {row.global_batch if strong else row.batch}" if row.batch else "",
    )


def _telling(settings: Sequence[tuple[str, ...]]) -> list[int]:
    """The fewest factors, the plainest first, that tell all settings apart."""
    told: list[int] = []
    for place in range(len(settings[0])):
        if len({tuple(one[p] for p in told) for one in settings}) == len(settings):
            break
        if len({one[place] for one in settings}) > 1:
            told.append(place)
    return told


def _fastest(own: Sequence[Row], rows: Sequence[Row]) -> str:
    best = max(own, key=_rate)
    others = [row for row in own if row is not best and row.workers == best.workers]
    text = f"{_name(best, rows)}, "
    scaled = best.speedup is not None and best.workers > 1
    text += f"{best.speedup:.2f} times single" if scaled else f"{_rate(best):,.0f} samples/s"
    if others:
        second = max(others, key=_rate)
        next_best = _members(second).replace(_workers(second), "")
        next_best = _name(second, rows) if second.name else next_best
        share = f" at {_rate(second) / _rate(best):.0%} of it"
        text += f"; then {next_best}"
        text += f", {second.speedup:.2f}" if scaled and second.speedup is not None else share
        if _overlap(best, second):
            text += ", too close to call"
    if best.trains_like_single is False:
        text += ". But it does not train like single"
        like = [row for row in own if row.trains_like_single and row.workers == best.workers]
        if like:
            same = max(like, key=_rate)
            text += f": the fastest that does is {_name(same, rows)}, {_rate(same):,.0f} samples/s"
    return text


def _overlap(one: Row, other: Row) -> bool:
    assert one.samples_per_second is not None
    assert other.samples_per_second is not None
    several = min(one.repeats, other.repeats) > 1
    return several and overlap(one.samples_per_second, other.samples_per_second)


def _name(row: Row, rows: Sequence[Row]) -> str:
    """The row in words; by its own name too where others would be called the same."""
    members = _members(row)
    if row.name and sum(_members(other) == members for other in rows) > 1:
        return f"{row.name} ({members})"
    return members


def _members(row: Row) -> str:
    servers = f", {row.servers} server{'s' if row.servers > 1 else ''}" if row.servers else ""
    return f"{row.architecture}{_workers(row)}{servers}"


def _workers(row: Row) -> str:
    return f" on {row.workers} worker" + ("s" if row.workers > 1 else "")


def _rate(row: Row) -> float:
    assert row.samples_per_second is not None
    return row.samples_per_second.median


def _total(summary: Summary, field: str) -> float | None:
    values = [getattr(member, field) for member in summary.members]
    known = [float(value) for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _per_step(summary: Summary, what: str) -> float | None:
    """Over measured steps; a run that has no samples over time only has totals to divide."""
    measured = getattr(summary, f"{what}_per_step")
    if isinstance(measured, float):
        return measured
    total = _total(summary, f"{what}_sent")
    return total / summary.steps if total is not None and summary.steps is not None else None


def _in_memory(summary: Summary) -> float | None:
    """Gradient bytes that servers summed from shared memory in each step; None where none were."""
    summed = [member.counters.get("summed_bytes") for member in summary.members]
    known = [value for value in summed if isinstance(value, int)]
    hosts = {member.host for member in summary.members}
    kind = summary.architecture
    shared = kind.startswith(("server", "hybrid")) and "transport=tcp" not in kind
    if not known or not shared or summary.engine != "here" or len(hosts) > 1:
        return None
    return sum(known) / summary.steps if summary.steps is not None else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
