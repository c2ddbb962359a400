"""Charts of one run's steps, member by member: a typical step as a trace viewer shows it, where
each worker's time goes, and how step times are spread.
"""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import altair as alt

from paceline import record
from paceline.record import PHASES, RunFolder, Step
from paceline.record.pauses import outside_seconds
from paceline.report.charts import PHASE_COLOURS, Chart, Values

ORDER = ("input", "forward", "backward", "wait", "exchange_exposed", "update")
"""In which a step meets its phases; the record keeps how long each took, not every switch."""

BINS = 30


def told(run: RunFolder) -> dict[str, Sequence[Step]]:
    """Each worker's measured steps, wait told from exchange and pauses from both."""
    experiment = run.experiment()
    workers = [member for member in run.members() if member.role == "worker"]
    steps = {member.name: own for member in workers if (own := run.steps(member.name))}
    offsets = {member.name: member.clock_offset_seconds or 0.0 for member in workers}
    if experiment.architecture.waits_for_all:
        steps = record.split_wait(steps, offsets)
    warmup = experiment.measurement.warmup_steps
    return {name: record.counted(own, warmup) for name, own in record.tell_pauses(steps).items()}


def timeline_values(run: RunFolder, steps: dict[str, Sequence[Step]]) -> tuple[int, Values]:
    """The number of a typical step, and each worker's phases in it, in ms from its start."""
    chosen = _typical_step(steps)
    offsets = {m.name: m.clock_offset_seconds or 0.0 for m in run.members()}
    found = {name: entry for name, own in steps.items() for entry in own if entry.step == chosen}
    begin = min(entry.start_seconds + offsets[name] for name, entry in found.items())
    values: Values = []
    for name, entry in found.items():
        at = entry.start_seconds + offsets[name] - begin
        for phase, seconds in _phases(entry):
            values.append(
                {
                    "member": name,
                    "phase": phase,
                    "from": _ms(at),
                    "to": _ms(at + seconds),
                    "ms": _ms(seconds),
                }
            )
            at += seconds
    return chosen, values


def timeline(data: str, step: int) -> Chart:
    chart = (
        _chart(data)
        .mark_bar(size=18)
        .encode(
            y=alt.Y("member:N", title=None, sort=None),
            x=alt.X("from:Q", title=f"ms from the start of step {step}"),
            x2="to:Q",
            color=_phase_colour(),
            tooltip=["member:N", "phase:N", alt.Tooltip("ms:Q", format=",.2f")],
        )
        .properties(height=alt.Step(30))
    )
    title = "One typical step, worker by worker"
    return Chart(name=f"timeline-{_slug(data)}", title=title, data=data, spec=_dict(chart))


def member_values(steps: dict[str, Sequence[Step]]) -> Values:
    """Mean milliseconds per phase of each worker: a mean over workers hides the slow one."""
    values: Values = []
    for name, own in steps.items():
        parts = {phase: fmean(s.breakdown_seconds.get(phase, 0.0) for s in own) for phase in PHASES}
        parts["other"] = max(0.0, fmean(outside_seconds(step) for step in own))
        parts["pauses"] = fmean(sum(step.paused_seconds.values()) for step in own)
        values += [
            {"member": name, "phase": phase, "ms": _ms(seconds), "order": n}
            for n, (phase, seconds) in enumerate(
                (phase, parts[phase.replace(" ", "_")]) for phase in PHASE_COLOURS
            )
            if seconds
        ]
    return values


def by_member(data: str) -> Chart:
    chart = (
        _chart(data)
        .mark_bar(size=18)
        .encode(
            y=alt.Y("member:N", title=None, sort=None),
            x=alt.X("ms:Q", title="ms per step, on average"),
            color=_phase_colour(),
            order="order:Q",
            tooltip=["member:N", "phase:N", alt.Tooltip("ms:Q", format=",.2f")],
        )
        .properties(height=alt.Step(30))
    )
    title = "Where each worker's step goes"
    return Chart(name=f"workers-{_slug(data)}", title=title, data=data, spec=_dict(chart))


def distribution_values(steps: dict[str, Sequence[Step]]) -> Values:
    """How many steps took how long, all workers together."""
    times = sorted(1e3 * step.seconds for own in steps.values() for step in own)
    low, high = times[0], times[-1]
    width = max((high - low) / BINS, 1e-3 * max(high, 1e-9))
    counts: dict[int, int] = {}
    for ms in times:
        place = min(int((ms - low) / width), BINS - 1)
        counts[place] = counts.get(place, 0) + 1
    return [
        {"from": _digits(low + n * width), "to": _digits(low + (n + 1) * width), "steps": count}
        for n, count in sorted(counts.items())
    ]


def distribution(data: str) -> Chart:
    chart = (
        _chart(data)
        .mark_bar(color=PHASE_COLOURS["forward"], binSpacing=1)
        .encode(
            x=alt.X("from:Q", bin="binned", title="ms of a step", scale=alt.Scale(zero=False)),
            x2="to:Q",
            y=alt.Y("steps:Q", title="steps", axis=alt.Axis(tickMinStep=1)),
            tooltip=["from:Q", "to:Q", "steps:Q"],
        )
        .properties(height=180)
    )
    title = "How long steps took"
    return Chart(name=f"steps-{_slug(data)}", title=title, data=data, spec=_dict(chart))


def _typical_step(steps: dict[str, Sequence[Step]]) -> int:
    """A step that all workers have, whose time is in the middle."""
    first, *others = steps.values()
    common = {s.step for s in first}.intersection(*({s.step for s in own} for own in others))
    shared = [s for s in first if s.step in common and not s.paused_seconds] or list(first)
    middle = median(step.seconds for step in shared)
    return min(shared, key=lambda step: abs(step.seconds - middle)).step


def _phases(entry: Step) -> list[tuple[str, float]]:
    parts = [(phase.replace("_", " "), entry.breakdown_seconds.get(phase, 0.0)) for phase in ORDER]
    rest = max(0.0, outside_seconds(entry))
    return [(phase, seconds) for phase, seconds in (*parts, ("other", rest)) if seconds > 0]


def _phase_colour() -> alt.Color:
    scale = alt.Scale(domain=list(PHASE_COLOURS), range=list(PHASE_COLOURS.values()))
    legend = alt.Legend(orient="top", columns=8, symbolType="square")
    return alt.Color("phase:N", title=None, scale=scale, legend=legend)


def _chart(data: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(name=data), width="container")


def _slug(data: str) -> str:
    return data.partition("/")[2]


def _dict(chart: Any) -> dict[str, Any]:
    made: dict[str, Any] = chart.to_dict()
    made.pop("config", None)
    return made


def _ms(seconds: float) -> float:
    return _digits(1e3 * seconds)


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
