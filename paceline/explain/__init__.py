"""A run (or two) -> where the time went, what limits it, what to do next. Reads records; no torch.

facts       what the files say: each worker's mean step, who was last, bytes over each link
parts       the step taken apart; the parts sum to the whole
unsteady    what comes and goes, and what comes and stays
limits      how long each resource was needed per step, and whose relief helps most
needs       how long a step with other needs would take: every promise
ledger      the account of a step: each second is charged to one cause, once
causes      one object per cause, one file per family of causes
accounting  causes charge in order of priority; the worst come first
advice      at most three actions, the most gain for the least effort first
words       the sentences that end a run
reference   the table of causes in docs/explain.md
"""

from paceline.explain.answer import conclude, explain, verdict
from paceline.explain.findings import Action, Cause, Explanation, Late, Part, Resource

__all__ = [
    "Action",
    "Cause",
    "Explanation",
    "Late",
    "Part",
    "Resource",
    "conclude",
    "explain",
    "verdict",
]
