"""How a run ended, where it did not end well. A failed run's explanation starts with this."""

from paceline.explain.facts import Facts
from paceline.record import RunFolder

ENDED = {
    "failed": "the run failed",
    "interrupted": "the run was interrupted",
    "killed": "the run was killed",
}
"""By its status; a run that finished or runs did not fail."""


def failure(run: RunFolder) -> str:
    """One sentence without its full stop: who failed, when and why; empty when nobody did."""
    summary = run.summary()
    if summary.status not in ENDED:
        return ""
    workers = [member.name for member in run.members() if member.role == "worker"]
    steps = max((len(run.steps(name)) for name in workers), default=0)
    done = f"{ENDED[summary.status]} " + (
        f"after {steps} steps" if steps else "before its first step"
    )
    ends = [event for event in run.events() if event.kind in ("lost", "failed", "interrupted")]
    if ends:
        return f"{done}: {ends[-1].text}"
    if summary.status == "killed":
        return f"{done}: its launcher is gone and nobody said why"
    failed = [member.name for member in run.members() if member.status == "failed"]
    return f"{done}: {', '.join(failed)} failed" if failed else done


def lost(facts: Facts) -> str:
    """Who was lost while the others went on; empty when nobody was."""
    if facts.summary.status != "finished":
        return ""
    texts = [event.text for event in facts.events if event.kind == "lost"]
    return "; ".join(texts)
