"""What happened: the files of a run, written as it goes, read by all that explains it. No torch."""

from paceline.record.entries import (
    PHASES,
    Event,
    Loss,
    Member,
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
    open_folder,
)
from paceline.record.machine import describe, versions
from paceline.record.summary import (
    counted,
    losses,
    split_wait,
    staleness,
    step_seconds,
    summarise,
    waits_for_all,
)

__all__ = [
    "FORMAT_VERSION",
    "PHASES",
    "Event",
    "Loss",
    "Member",
    "RunFolder",
    "Sample",
    "Step",
    "StepSeconds",
    "Summary",
    "cannot_write",
    "counted",
    "describe",
    "empty_summary",
    "losses",
    "open_folder",
    "split_wait",
    "staleness",
    "step_seconds",
    "summarise",
    "versions",
    "waits_for_all",
]
