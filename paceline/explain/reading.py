"""A run whose files are read once, however often they are asked for while it is explained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import spec
from paceline.record import MemberRecord, RecordedEvent, RunFolder, Sample, Step, Summary


class ReadOnce(RunFolder):
    """What was read stays in memory; nobody changes it. Use it up before the run goes on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._kept: dict[str, Any] = {}

    def experiment(self) -> spec.Experiment:
        found: spec.Experiment = self._once("experiment", super().experiment)
        return found

    def summary(self) -> Summary:
        found: Summary = self._once("summary", super().summary)
        return found

    def machine(self) -> dict[str, object]:
        return dict(self._once("machine", super().machine))

    def members(self) -> list[MemberRecord]:
        return list(self._once("members", super().members))

    def all_steps(self, member: str) -> list[Step]:
        read = super().all_steps
        return list(self._once(f"steps of {member}", lambda: read(member)))

    def series(self, member: str) -> list[Sample]:
        read = super().series
        return list(self._once(f"series of {member}", lambda: read(member)))

    def events(self) -> list[RecordedEvent]:
        return list(self._once("events", super().events))

    def _once(self, what: str, read: Callable[[], Any]) -> Any:
        if what not in self._kept:
            self._kept[what] = read()
        return self._kept[what]
