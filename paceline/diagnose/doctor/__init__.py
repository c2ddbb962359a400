"""Before step 1: what every member sees, what lies between them, and what is wrong, with the fix.

`facts` are gathered by each member about itself, `probes` measure what lies between two of them,
`examination` brings both together at member 0, and `findings` judges: pure functions of facts.
"""

from paceline.diagnose.doctor.examination import Examination, examine, unreachable
from paceline.diagnose.doctor.facts import MemberFacts, Requirements, gather
from paceline.diagnose.doctor.findings import DoctorFinding, findings, require_healthy
from paceline.diagnose.doctor.probes import Pair, reach

__all__ = [
    "DoctorFinding",
    "Examination",
    "MemberFacts",
    "Pair",
    "Requirements",
    "examine",
    "findings",
    "gather",
    "reach",
    "require_healthy",
    "unreachable",
]
