"""Figures of a run from the members' files: throughput, step times, breakdown, loss.

A loss is the mean over the global batch. The first `warmup_steps` of every worker count for no
figure but the losses.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean, median

import msgspec

from paceline.record import traffic
from paceline.record.entries import (
    IN_EVALUATION,
    NOT_FINITE,
    PHASES,
    Loss,
    MemberRecord,
    Step,
    StepSeconds,
    Summary,
)
from paceline.record.folder import RunFolder, empty_summary
from paceline.record.lives import RESTART
from paceline.record.pauses import tell_pauses, total
from paceline.record.wall import Span, wall_seconds

NOTED = (
    "note",
    "lost",
    "warning",
    NOT_FINITE,
    IN_EVALUATION,
    "interrupted",
    "fault",
    "stall",
    RESTART,
)
"""Kinds of events that the summary repeats in words."""


def summarise(folder: RunFolder, status: str, span: Span | None = None) -> Summary:
    """Compute the summary from what the members wrote so far, write it and return it.

    `span`: when whoever started the members began and ended, on worker 0's clock.
    """
    experiment = folder.experiment()
    summary = empty_summary(experiment, status)
    summary.members = folder.members()
    workers = [member for member in summary.members if member.role == "worker"]
    steps = {worker.name: folder.steps(worker.name) for worker in workers}
    steps = {name: found for name, found in steps.items() if found}
    events = folder.events()
    notes = [event.text for event in events if event.kind in NOTED]
    if notes:
        summary.notes = list(dict.fromkeys(notes))
    unseen = [event.samples for event in events if event.samples is not None]
    if unseen:
        summary.samples_not_seen = sum(unseen)
    if steps:
        offsets = {w.name: w.clock_offset_seconds or 0.0 for w in workers}
        lost = gone(folder)
        together = experiment.architecture.waits_for_all
        told = tell_pauses(split_wait(steps, offsets) if together else steps)
        warmup = experiment.measurement.warmup_steps
        _add_figures(summary, told, warmup, lost)
        _add_traffic(summary, folder, told, warmup)
        left = [worker for worker in workers if worker.name not in lost and worker.name in steps]
        summary.wall_seconds = wall_seconds(left or workers, told, warmup, span)
    _add_results(summary, workers)
    folder.write_summary(summary)
    return summary


def split_wait(
    steps: Mapping[str, Sequence[Step]], clock_offsets: Mapping[str, float]
) -> dict[str, list[Step]]:
    """Tell waiting for the slowest worker from exchanging.

    An exchange in which all take part ends for everyone when the last has brought its gradients, so
    everyone's duration looks alike. The moments at which gradients were ready, on one clock, say
    who was waited for: the part of `exchange_exposed` before the last worker was ready is `wait`.
    """
    last_ready: dict[int, float] = {}
    for name, entries in steps.items():
        for entry in entries:
            if entry.ready_seconds is not None:
                ready = entry.ready_seconds + clock_offsets.get(name, 0.0)
                last_ready[entry.step] = max(ready, last_ready.get(entry.step, ready))
    return {
        name: [_with_wait(entry, last_ready, clock_offsets.get(name, 0.0)) for entry in entries]
        for name, entries in steps.items()
    }


def _with_wait(entry: Step, last_ready: Mapping[int, float], offset: float) -> Step:
    exposed = entry.breakdown_seconds.get("exchange_exposed", 0.0)
    if entry.ready_seconds is None or "wait" in entry.breakdown_seconds or not exposed:
        return entry
    wait = min(exposed, last_ready[entry.step] - (entry.ready_seconds + offset))
    parts = {**entry.breakdown_seconds, "exchange_exposed": exposed - wait, "wait": wait}
    return msgspec.structs.replace(entry, breakdown_seconds=parts)


def counted(steps: Sequence[Step], warmup_steps: int) -> Sequence[Step]:
    """The steps that figures are made of; a run shorter than its warm-up counts its last step."""
    return steps[min(warmup_steps, len(steps) - 1) :]


def step_seconds(durations: Sequence[float]) -> StepSeconds:
    middle = median(durations)
    ordered = sorted(durations)
    return StepSeconds(
        median=middle,
        p95=ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        jitter=median(abs(duration - middle) for duration in durations),
    )


def gone(folder: RunFolder) -> dict[str, int]:
    """Worker that was lost -> the first step without it.

    What it did in its last second it may not have written.
    """
    told = {event.member: event.step for event in folder.events() if event.kind == "lost"}
    found: dict[str, int] = {}
    for member in folder.members():
        if member.role == "worker" and member.status == "lost":
            written = folder.steps(member.name)
            step = told.get(member.name)
            found[member.name] = step if step is not None else len(written) and written[-1].step + 1
    return found


def losses_of(folder: RunFolder) -> dict[int, float]:
    """Loss of each step of a run."""
    workers = [member.name for member in folder.members() if member.role == "worker"]
    steps = {name: own for name in workers if (own := folder.steps(name))}
    return losses(steps, gone(folder))


def losses(
    steps: Mapping[str, Sequence[Step]], gone: Mapping[str, int] | None = None
) -> dict[int, float]:
    """Loss of each step: the mean over the global batch, known once every worker has reported.

    Workers that are `gone` are not waited for from that step on, and those that joined not before
    their first.
    """
    last_words = [step - 1 for name, step in (gone or {}).items() if name in steps]
    first_words = [entries[0].step if entries else 0 for entries in steps.values()]
    totals: dict[int, tuple[float, int, int]] = {}
    for entries in steps.values():
        for entry in entries:
            if entry.loss is not None:
                total, samples, reports = totals.get(entry.step, (0.0, 0, 0))
                totals[entry.step] = (
                    total + entry.loss * entry.samples,
                    samples + entry.samples,
                    reports + 1,
                )
    complete = {
        step: found
        for step, found in totals.items()
        if found[2] == _reports(step, first_words, last_words) and found[1]
    }
    return {step: total / samples for step, (total, samples, _) in sorted(complete.items())}


def _reports(step: int, first_words: Sequence[int], last_words: Sequence[int]) -> int:
    """Return the number of workers that report the loss of a step."""
    return sum(first <= step for first in first_words) - sum(last < step for last in last_words)


def _add_figures(
    summary: Summary,
    steps: Mapping[str, Sequence[Step]],
    warmup_steps: int,
    lost: Mapping[str, int],
) -> None:
    measured = {name: counted(entries, warmup_steps) for name, entries in steps.items()}
    durations = [s.seconds for own in measured.values() for s in own]
    summary.steps = max(entries[-1].step + 1 for entries in steps.values())
    summary.step_seconds = step_seconds(durations)
    part_time = _part_time(steps, lost)
    summary.samples_per_second = _rates(measured, part_time, lambda step: step.seconds)
    summary.samples_per_second_with_pauses = _rates(
        measured, part_time, lambda step: step.seconds + total(step)
    )
    summary.breakdown_seconds = {
        phase: fmean(s.breakdown_seconds.get(phase, 0.0) for own in measured.values() for s in own)
        for phase in PHASES
    }
    by_step = losses(steps, lost)
    if by_step:
        summary.loss = Loss(
            first=by_step[min(by_step)],
            last=by_step[max(by_step)],
            not_finite_from=not_finite_from(by_step),
        )


def not_finite_from(by_step: Mapping[int, float]) -> int | None:
    """The first step whose loss is infinite or not a number; None when all are finite."""
    return min((step for step, loss in by_step.items() if not math.isfinite(loss)), default=None)


def _part_time(steps: Mapping[str, Sequence[Step]], lost: Collection[str]) -> set[str]:
    """Workers that were lost before the end, or joined after the beginning."""
    began = min(entries[0].step for entries in steps.values())
    return {n for n, entries in steps.items() if n in lost or entries[0].step > began}


def _rates(
    measured: Mapping[str, Sequence[Step]],
    part_time: Collection[str],
    seconds_of: Callable[[Step], float],
) -> float:
    """Samples a second over all workers.

    Each worker's own rate, added up: right for workers in step and for workers that are not. What
    one did that was there for a part of the time only is spread over all of it.
    """
    seconds = {name: sum(map(seconds_of, own)) for name, own in measured.items()}
    longest = max(seconds.values())
    return sum(
        sum(step.samples for step in own)
        / max(longest if name in part_time else seconds[name], 1e-9)
        for name, own in measured.items()
    )


def _add_traffic(
    summary: Summary, folder: RunFolder, steps: Mapping[str, Sequence[Step]], warmup_steps: int
) -> None:
    """Return the bytes that a measured step sends over all members, if all counted them."""
    measured = {name: counted(entries, warmup_steps) for name, entries in steps.items()}
    mean_seconds = fmean(s.seconds for own in measured.values() for s in own)
    found = traffic.per_step(folder, summary.members, measured, mean_seconds)
    if found and len(found) == len(summary.members):
        summary.bytes_per_step = sum(one.bytes_sent for one in found.values())
        summary.packets_per_step = sum(one.packets_sent for one in found.values())


def _add_results(summary: Summary, workers: Sequence[MemberRecord]) -> None:
    """Accuracy as one worker found it, staleness over all of them, epoch time from throughput."""
    if not workers:
        return
    results = next((worker.results for worker in workers if worker.results), {})
    accuracy: dict[str, float] = {k: results[k] for k in ("top1", "top5") if k in results}
    if accuracy:
        summary.accuracy = accuracy
    if "num_samples" in results and summary.samples_per_second is not None:
        summary.epoch_seconds = results["num_samples"] / summary.samples_per_second
    counts = [item for own in staleness(summary.members).values() for item in own.items()]
    total = sum(count for _, count in counts)
    if total:
        mean = sum(behind * count for behind, count in counts) / total
        summary.staleness = {"mean": mean, "max": float(max(behind for behind, _ in counts))}


def staleness(members: Iterable[MemberRecord]) -> dict[str, dict[int, int]]:
    """Worker -> how many of its gradients were made from weights that many updates old.

    Every member that serves counts the gradients it takes, by worker.
    """
    found: dict[str, dict[int, int]] = {}
    for member in members:
        by_worker = member.counters.get("staleness")
        for worker, counts in by_worker.items() if isinstance(by_worker, dict) else ():
            own = found.setdefault(worker, {})
            for behind, count in counts.items():
                own[int(behind)] = own.get(int(behind), 0) + int(count)
    return found
