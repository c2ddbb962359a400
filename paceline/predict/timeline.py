"""A predicted step as a timeline: what each device and each connection does when.

    timeline = Timeline()
    simulate(experiment, timeline=timeline)
    timeline.write(Path("step.json"))     # open it in Perfetto or chrome://tracing

A simulation with servers notes every stretch of computing and every message on its way; one with
collectives the buckets of a typical worker. Members that stand for many alike are drawn once.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SHOWN_STEPS = 2


class Span(NamedTuple):
    member: str
    lane: str
    name: str
    start_seconds: float
    seconds: float


class Timeline:
    """Spans of one simulation, in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.step_ends: list[float] = []
        """Of the first worker."""

    def add(self, member: str, lane: str, name: str, start_seconds: float, seconds: float) -> None:
        if seconds > 0:
            self.spans.append(Span(member, lane, name, start_seconds, seconds))

    def events(self) -> Iterator[dict[str, Any]]:
        """Chrome trace events of the last steps, from zero."""
        ends = self.step_ends
        begin = ends[-SHOWN_STEPS - 1] if len(ends) > SHOWN_STEPS else 0.0
        shown = [span for span in self.spans if span.start_seconds + span.seconds > begin]
        members = {
            name: number for number, name in enumerate(dict.fromkeys(s.member for s in shown))
        }
        lanes = {key: n for n, key in enumerate(dict.fromkeys((s.member, s.lane) for s in shown))}
        for name, pid in members.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for (member, lane), tid in lanes.items():
            about = {"pid": members[member], "tid": tid, "args": {"name": lane}}
            yield {"ph": "M", "name": "thread_name", **about}
        for span in shown:
            start = max(span.start_seconds, begin)
            yield {
                "ph": "X",
                "name": span.name,
                "pid": members[span.member],
                "tid": lanes[span.member, span.lane],
                "ts": round((start - begin) * 1e6, 3),
                "dur": round((span.start_seconds + span.seconds - start) * 1e6, 3),
            }

    def write(self, path: Path) -> None:
        content = {"schemaVersion": 1, "traceEvents": list(self.events())}
        path.write_text(json.dumps(content), encoding="utf-8")
