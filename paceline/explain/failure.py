"""How a run ended, where it did not end well. A failed run's explanation starts with this."""

import time

import psutil

from paceline.explain.facts import Facts
from paceline.record import Member, RunFolder

SILENT_SECONDS = 10.0
"""Members write every second; files that have stood still for longer belong to nobody."""


def failure(run: RunFolder) -> str:
    """One sentence without its full stop: who failed, when and why; empty when nobody did."""
    summary = run.summary()
    if summary.status == "finished":
        return ""
    members, events = run.members() or summary.members, run.events()
    ends = [event for event in events if event.kind in ("lost", "failed")]
    done = f" after {summary.steps} steps" if isinstance(summary.steps, int) else ""
    if summary.status == "running":
        if not members or not _is_silent(run) or any(map(_is_alive, members)):
            return ""
        steps = max((len(run.steps(m.name)) for m in members if m.role == "worker"), default=0)
        done = f" after {steps} steps" if steps else " before its first step"
        return f"the run was killed{done}: its members are gone and none said why"
    if ends:
        where = done or " before its first step"
        return f"the run failed{where}: {ends[-1].text}"
    failed = [member.name for member in members if member.status == "failed"]
    who = f": {', '.join(failed)} failed" if failed else ""
    return f"the run {summary.status}{done or ' before its first step'}{who}"


def lost(facts: Facts) -> str:
    """Who was lost while the others went on; empty when nobody was."""
    if facts.summary.status != "finished":
        return ""
    texts = [event.text for event in facts.events if event.kind == "lost"]
    return texts[0] if texts else ""


def _is_silent(run: RunFolder) -> bool:
    files = (run.path / "members").iterdir()
    newest = max((file.stat().st_mtime for file in files), default=0.0)
    return time.time() - newest > SILENT_SECONDS


def _is_alive(member: Member) -> bool:
    return member.pid is not None and psutil.pid_exists(member.pid)
