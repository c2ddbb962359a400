"""From the files of all ranks to a summary and a verdict; done by rank 0, or by who reads later."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from paceline import record
from paceline.errors import PacelineError
from paceline.explain import conclude
from paceline.observe.clocks import Offset, align
from paceline.observe.waiting import tell_waiting
from paceline.record import MemberRecord, RunFolder, Summary
from paceline.record.entries import OBSERVED

OTHERS_SECONDS = 3.0
"""Rank 0 waits no longer for the others' last lines: the job has ended."""


def conclude_with_others(folder: RunFolder) -> None:
    """Wait for the last lines of the other ranks, write the summary and print the verdict."""
    until = time.monotonic() + OTHERS_SECONDS
    expected = folder.experiment().cluster.workers
    while time.monotonic() < until:
        members = folder.members()
        running = [member for member in members if member.status == "running"]
        if len(members) >= expected and not running:
            break
        time.sleep(0.05)
    summary = finish(folder)
    said = summary.verdict or "no step was seen: no torch optimizer stepped in this process."
    print(f"paceline observe: {said}\n  {_shown(folder.path)}", file=sys.stderr)


def _shown(path: Path) -> str:
    try:
        short = path.relative_to(Path.cwd())
    except ValueError:
        short = path
    return f"read more: paceline explain {short}"


def is_observed(folder: RunFolder) -> bool:
    """Whether the run was observed or imported, and not made by Paceline."""
    return folder.summary().engine == OBSERVED


def refresh(folder: RunFolder) -> None:
    """Finish a run again whose ranks wrote more since: killed ones, and those of other hosts."""
    if not is_observed(folder):
        return
    summary = folder.summary()
    if summary.status == "running":
        return
    written = {member.name: member.status for member in folder.members()}
    known = {member.name: member.status for member in summary.members}
    if written and written != known:
        try:
            finish(folder)
        except PacelineError:  # the folder cannot be written; it is read as it is
            return


def finish(folder: RunFolder) -> Summary:
    """Align clocks, tell waiting from transfer, compute the summary and add the verdict."""
    members = [member for member in folder.members() if member.role == "worker"]
    before = folder.summary()
    offsets = place_clocks(folder, members)
    if len(members) > 1:
        steps = {member.name: folder.all_steps(member.name) for member in members}
        steps = {name: own for name, own in steps.items() if own}
        calls = {name: folder.collectives(name) for name in steps}
        seconds = {name: offset.seconds for name, offset in offsets.items()}
        for name, told in tell_waiting(steps, calls, seconds).items():
            folder.write_steps(name, told)
    summary = record.summarise(folder, _status(members, before))
    summary.engine = OBSERVED
    summary.architecture = observed_architecture(members)
    summary.workers = max(summary.workers, len(members))
    folder.write_summary(summary)
    return conclude(folder)


def place_clocks(folder: RunFolder, members: list[MemberRecord]) -> dict[str, Offset]:
    """Write each member's clock offset with its error into its file; return all of them."""
    calls = {member.name: folder.collectives(member.name) for member in members}
    offsets = align(calls, {member.name: _clock(member) for member in members})
    for member in members:
        offset = offsets.get(member.name)
        if offset is not None and offset.collectives:
            member.clock_offset_seconds = offset.seconds
            told: Mapping[str, object] = {
                "error_seconds": offset.error_seconds,
                "collectives": offset.collectives,
            }
            member.counters["clock"] = dict(told)
            folder.write_member(member)
    return offsets


def observed_architecture(members: list[MemberRecord]) -> str:
    """The architecture that the ranks saw; the first one's where they differ."""
    for member in members:
        seen = member.counters.get("observed")
        if isinstance(seen, dict) and isinstance(seen.get("architecture"), str):
            return str(seen["architecture"])
    return OBSERVED


def _clock(member: MemberRecord) -> str:
    seen = member.counters.get("observed")
    return str(seen.get("clock", member.host)) if isinstance(seen, dict) else member.host


def _status(members: list[MemberRecord], before: Summary) -> str:
    statuses = {member.status for member in members}
    if "failed" in statuses:
        return "failed"
    if statuses == {"finished"}:
        return "finished"
    return "killed" if before.status == "killed" else "finished"
