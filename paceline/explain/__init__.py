"""A run (or two) -> where the time went, what limits it, what to do next. Reads records; no torch.

facts       what the files say: each worker's mean step, who was last, bytes over each link
parts       the step taken apart; the parts sum to the whole
unsteady    what comes and goes, and what comes and stays
limits      how long each resource was needed per step; the longest binds
needs       how long a step with other needs would take: every promise
causes      which losses are worth a sentence, and why they arose
actions     what to do about them; exchanging: about an exchange that takes too long
words       the sentences
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
