"""What an object of a cause holds. Everything that is said about a cause stands in one place."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.explain.evidence import Evidence
from paceline.explain.findings import Action, CauseName
from paceline.explain.ledger import StepAccount


def charge_nothing(evidence: Evidence, ledger: StepAccount) -> None:
    """Charge no time: the cause is about something else."""


def charge_rest(name: CauseName, *accounts: str) -> Callable[[Evidence, StepAccount], None]:
    """Return a claim on all that causes with a lower priority left in these accounts."""

    def claim(evidence: Evidence, ledger: StepAccount) -> None:
        ledger.charge_all(name, *accounts)

    return claim


def no_advice(evidence: Evidence) -> Iterable[Action]:
    """Return no action."""
    return ()


@dataclass(frozen=True, kw_only=True)
class CauseRule:
    """A cause: its name, what it means, the seconds that it charges, its sentence and advice."""

    name: CauseName
    title: str
    """What it means, for the documentation."""

    proof: str
    """The figures of the record that prove it, for the documentation."""

    sentence: Callable[[Evidence, str], str]
    """What is said of it, without a full stop; the second argument is its cost in words."""

    advice: Callable[[Evidence], Iterable[Action]] = no_advice
    claim: Callable[[Evidence, StepAccount], None] = charge_nothing
    """Charge the seconds of a step that this cause explains."""

    priority: int = 50
    """Causes with a lower number charge first."""

    accounts: tuple[str, ...] = ()
    """Where its seconds lie if it was there for a part of the run only."""

    of_experiment: bool = False
    """Whether it is there from the first step to the last, as the experiment asks for it."""
