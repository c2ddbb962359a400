"""What is known of a run when its causes are named: facts, parts, needs and what is unsteady."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.explain.facts import Facts
from paceline.explain.findings import CauseName, Late, Learning, Part
from paceline.explain.machine import Shortage
from paceline.explain.needs import Needs
from paceline.explain.spans import Slowed
from paceline.explain.unsteady import Unsteady


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A cause and the seconds of a step that are charged to it."""

    name: CauseName
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of a run when its causes are named."""

    facts: Facts
    needs: Needs
    parts: Sequence[Part]
    late: Late | None
    shortage: Shortage | None
    unsteady: Unsteady | None = None
    slowed: tuple[Slowed, ...] = ()
    """Slow parts of the run of which only the length is known; the worst first."""

    learning: Learning | None = None
    baseline: Facts | None = None
    efficiency: float | None = None
    failure: str = ""
    lost: str = ""
    inside: "tuple[Inside, ...]" = ()

    @property
    def whole_seconds(self) -> float:
        """A step and the pauses before it: the denominator of every percentage."""
        return self.facts.typical.step_seconds + self.facts.typical.paused_seconds

    def share(self, seconds: float) -> float:
        """Share of the run's time, from its first counted step to its last."""
        return seconds / self.whole_seconds


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The slow steps of a run that was slow for a part of it, explained separately."""

    slow: Slowed
    evidence: Evidence
    loss: Loss
    """What those steps lose, and the others do not."""

    steps_fraction: float
    """Their share of all steps."""
