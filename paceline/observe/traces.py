"""From the traces of several ranks to the steps and collectives of a run."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from paceline.observe.kineto import CollectiveEvent, Interval, Trace
from paceline.record import CollectiveCall, Step

IN_STEP = 100_000
"""Collectives are numbered by step, so that traces which begin at different steps still agree."""


def windows(trace: Trace) -> dict[int, Interval]:
    """The steps of a trace: as the profiler marks them, or from one update's end to the next's."""
    if trace.steps:
        return trace.steps
    ends = [end for _, end in sorted(trace.update)]
    return dict(enumerate(pairwise(ends)))


def steps_of(trace: Trace) -> tuple[list[Step], list[CollectiveCall]]:
    """What one rank did, step by step."""
    steps, calls = [], []
    collectives = sorted(trace.collectives, key=lambda one: one.begin)
    arrivals = _arrivals(trace, collectives)
    for number, window in sorted(windows(trace).items()):
        step, own = _step(trace, number, window, collectives, arrivals)
        steps.append(step)
        calls += own
    return steps, calls


def _arrivals(trace: Trace, collectives: Sequence[CollectiveEvent]) -> list[float]:
    """When each collective was called; where calls and events do not pair up, when it began."""
    called = sorted(trace.called)
    if len(called) == len(collectives):
        return [min(c, one.begin) for c, one in zip(called, collectives, strict=True)]
    return [one.begin for one in collectives]


def _step(
    trace: Trace,
    number: int,
    window: Interval,
    collectives: Sequence[CollectiveEvent],
    arrivals: Sequence[float],
) -> tuple[Step, list[CollectiveCall]]:
    begin, end = window
    first = bisect_left(arrivals, begin)
    own = []
    while first < len(arrivals) and arrivals[first] < end:
        own.append(first)
        first += 1
    parts = {
        "input": _seconds(trace.input, window),
        "update": _seconds(trace.update, window),
    }
    passes = _inside(trace.backward, window)
    ready = passes[-1][1] if passes else None
    if passes:
        parts |= _both_passes(trace, window, passes)
    exposed = 0.0
    if trace.kernels:
        exposed = _uncovered([(c.begin, c.end) for c in collectives], trace.kernels, window)
        if exposed:  # the host's passes hold it too
            whole = parts.get("backward", 0.0)
            parts["backward"] = max(0.0, whole - exposed)
    elif ready is not None and own:
        limit = min((b for b, _ in trace.update if b >= ready), default=end)
        exposed = max(0.0, min(max(collectives[i].end for i in own), limit, end) - ready)
    parts["exchange_exposed"] = exposed
    step = Step(
        step=number,
        start_seconds=begin,
        end_seconds=end,
        breakdown_seconds={name: seconds for name, seconds in parts.items() if seconds > 0},
        samples=1,
        ready_seconds=ready if own else None,
    )
    return step, [
        _call(number, place, collectives[i], arrivals[i], ready if i == own[-1] else None)
        for place, i in enumerate(own)
    ]


def _call(
    step: int, place: int, one: CollectiveEvent, arrived: float, ready: float | None
) -> CollectiveCall:
    blocked = None if ready is None else min(max(ready, arrived), one.end)
    return CollectiveCall(
        number=step * IN_STEP + place,
        group=one.group,
        name=one.name,
        bytes=one.bytes,
        arrived_seconds=arrived,
        blocked_seconds=blocked,
        ended_seconds=one.end,
    )


def _both_passes(trace: Trace, window: Interval, passes: Sequence[Interval]) -> dict[str, float]:
    """Forward and backward, by turns where gradients are accumulated."""
    forwards = _inside(trace.forward, window)
    if not forwards:
        marks = [
            e for b, e in (*trace.input, *trace.update) if window[0] <= b and e <= passes[0][0]
        ]
        forwards = [(max(marks, default=window[0]), passes[0][0])]
    forward = backward = 0.0
    for number, (begin, _) in enumerate(forwards):
        until = forwards[number + 1][0] if number + 1 < len(forwards) else window[1]
        own = [one for one in passes if begin <= one[0] < until]
        if own:
            forward += own[0][0] - begin
            backward += own[-1][1] - own[0][0]
    return {"forward": forward, "backward": backward}


def _inside(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    return [one for one in intervals if window[0] <= one[0] < window[1]]


def _seconds(intervals: Sequence[Interval], window: Interval) -> float:
    return sum(min(e, window[1]) - b for b, e in _inside(intervals, window))


def _uncovered(whole: Sequence[Interval], cover: Sequence[Interval], window: Interval) -> float:
    """Seconds of the window in which one of `whole` ran and none of `cover`."""
    edges = []
    for intervals, sign in ((whole, 1), (cover, -1)):
        for begin, end in intervals:
            begin, end = max(begin, window[0]), min(end, window[1])
            if begin < end:
                edges += [(begin, sign, 1), (end, sign, -1)]
    edges.sort()
    found = before = 0.0
    running = covering = 0
    for moment, sign, change in edges:
        if running and not covering:
            found += moment - before
        before = moment
        running += change if sign > 0 else 0
        covering += change if sign < 0 else 0
    return found
