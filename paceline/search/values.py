"""What a run is worth for a goal, while it runs and after it. Reads records only."""

import math
from collections.abc import Mapping
from statistics import fmean

from paceline.record import RunFolder
from paceline.record.summary import losses_of
from paceline.spec.search import Goal, Search

REPORTS = 20
"""A trial reports its loss that many times, evenly over its steps."""

UNKNOWN_LENGTH_STEPS = 10
"""Steps between two reports of a script, whose length nobody knows."""


WARMUP_FRACTION = 0.2
"""Part of a trial in which no other trial's median ends it: first losses say little."""


class Course:
    """The losses of one trial, reported at fixed steps.

    A report is the mean loss since the report before. The steps are fixed, so that a trial is ended
    at the same step whenever the search is repeated, however busy the machine is.
    """

    def __init__(self, num_steps: int | None) -> None:
        self._every = max(1, num_steps // REPORTS) if num_steps else UNKNOWN_LENGTH_STEPS
        self._reported = 0

    def new_reports(self, losses: Mapping[int, float]) -> list[tuple[int, float]]:
        """Return (step, loss) for each report that has become due."""
        found = []
        while (end := (self._reported + 1) * self._every) - 1 in losses:
            window = [losses[step] for step in range(end - self._every, end) if step in losses]
            found.append((end, fmean(window)))
            self._reported += 1
        return found


def final_loss(losses: Mapping[int, float]) -> float | None:
    """Return the mean loss of the last tenth of the steps: one batch alone says little."""
    if not losses:
        return None
    last = sorted(losses)[-max(1, len(losses) // 10) :]
    return fmean(losses[step] for step in last)


def value_of(folder: RunFolder, goal: Goal, search: Search) -> tuple[float | None, str]:
    """Return what a finished run is worth, or None and the reason why it has no value."""
    summary = folder.summary()
    if goal.name == "throughput":
        rate = summary.samples_per_second
        return (rate, "") if rate else (None, "the run has no throughput")
    if goal.name == "accuracy":
        found = (summary.accuracy or {}).get("top1")
        return (found, "") if found is not None else (None, "the run has no accuracy")
    if goal.name == "cost" and goal.loss is None:
        rate = summary.samples_per_second
        hosts = num_hosts(folder)
        cost = cost_per_million(rate, hosts, search.price_per_hour) if rate else None
        return cost, "" if rate else "the run has no throughput"
    losses = losses_of(folder)
    if goal.name == "loss":
        loss = final_loss(losses)
        if loss is None:
            return None, "the run reported no loss"
        return (loss, "") if math.isfinite(loss) else (None, "its loss is not a number")
    seconds = seconds_to(folder, losses, goal.loss or 0.0)
    if seconds is None:
        return None, f"the loss did not reach {goal.loss:g}"
    if goal.name == "time":
        return seconds, ""
    return num_hosts(folder) * search.price_per_hour * seconds / 3600, ""


def seconds_to(folder: RunFolder, losses: Mapping[int, float], target: float) -> float | None:
    """Return the seconds from the first step until the mean of ten losses is at most `target`."""
    steps = folder.steps("worker0")
    if not steps:
        return None
    ends = {step.step: step.end_seconds for step in steps}
    recent: list[float] = []
    for step in sorted(losses):
        recent = [*recent[-9:], losses[step]]
        if len(recent) == 10 and fmean(recent) <= target and step in ends:
            return ends[step] - steps[0].start_seconds
    return None


def num_hosts(folder: RunFolder) -> int:
    """Return how many hosts are paid for: emulated ones, or this machine."""
    return max(1, len({member.host for member in folder.members()}))


def cost_per_million(samples_per_second: float, hosts: int, price_per_hour: float) -> float:
    """Return the price of training on one million samples."""
    return hosts * price_per_hour / 3600 * 1e6 / samples_per_second
