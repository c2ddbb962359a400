"""Every cause that an explanation can name, one object each; a file holds a family of them.

links        cables, uplinks of racks, delays
servers      too few, uneven, without a core, too small a quorum
exchange     codecs, small pieces, exchanges that are repeated; what nothing explains
machine      cores and memory
computing    slower code, and batches too small for the fixed cost of a step
input        samples that come late, and what their readers wait for
stragglers   one worker that is late, one in turn, stages of a pipeline
spells       what is there for a part of the run, and what comes and goes
pauses       checkpoints, evaluation, the script, the first steps
learning     losses and samples
failures     how a run ended
"""

from paceline.explain.causes import (
    computing,
    exchange,
    failures,
    input,
    learning,
    links,
    machine,
    pauses,
    servers,
    spells,
    stragglers,
)
from paceline.explain.causes.rule import CauseRule

FAMILIES = (
    failures,
    learning,
    machine,
    input,
    computing,
    exchange,
    links,
    servers,
    stragglers,
    spells,
    pauses,
)

RULES: dict[str, CauseRule] = {rule.name: rule for family in FAMILIES for rule in family.CAUSES}
"""Name -> the object of a cause."""

IN_ORDER = sorted(RULES.values(), key=lambda rule: rule.priority)
"""All causes in the order in which they charge the seconds of a step."""
