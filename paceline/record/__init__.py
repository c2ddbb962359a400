"""The files of a run, written while it goes and read by all that explains it. No torch."""

from paceline.record.entries import (
    PHASES,
    CollectiveCall,
    Loss,
    MemberRecord,
    RecordedEvent,
    Sample,
    Step,
    StepSeconds,
    Summary,
)
from paceline.record.folder import (
    FORMAT_VERSION,
    RunFolder,
    cannot_write,
    empty_summary,
    free_path,
    open_folder,
)
from paceline.record.machine import describe, versions
from paceline.record.pauses import tell_pauses
from paceline.record.summary import (
    counted,
    gone,
    losses,
    losses_of,
    not_finite_from,
    split_wait,
    staleness,
    step_seconds,
    summarise,
)
from paceline.record.traffic import MemberTraffic, per_step

__all__ = [
    "FORMAT_VERSION",
    "PHASES",
    "CollectiveCall",
    "Loss",
    "MemberRecord",
    "MemberTraffic",
    "RecordedEvent",
    "RunFolder",
    "Sample",
    "Step",
    "StepSeconds",
    "Summary",
    "cannot_write",
    "counted",
    "describe",
    "empty_summary",
    "free_path",
    "gone",
    "losses",
    "losses_of",
    "not_finite_from",
    "open_folder",
    "per_step",
    "split_wait",
    "staleness",
    "step_seconds",
    "summarise",
    "tell_pauses",
    "versions",
]
