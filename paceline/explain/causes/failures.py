"""Causes in how a run ended: it failed, or a member failed and the others continued."""

from paceline.explain.causes.rule import CauseRule
from paceline.explain.findings import Action

CAUSES = (
    CauseRule(
        name="failed",
        title="the run did not end well",
        proof="status, events",
        sentence=lambda evidence, cost: evidence.failure,
    ),
    CauseRule(
        name="lost",
        title="a member failed, and the others continued or all began again",
        proof="status, events",
        sentence=lambda evidence, cost: evidence.lost,
        advice=lambda evidence: [
            Action(text="read what it said last: the run's folder has its log")
        ],
    ),
)
