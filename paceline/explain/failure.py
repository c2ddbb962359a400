"""How a run ended, where it did not end well. A failed run's explanation starts with this."""

from paceline.errors import PacelineError
from paceline.explain.facts import Facts
from paceline.record import RunFolder, checkpoints
from paceline.record.entries import OBSERVED
from paceline.record.lives import RESTART

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
        return f"{done}: {ends[-1].text.rstrip('.')}"
    if summary.engine == OBSERVED and (still := _stood_still(run)):
        return f"{done}: {still}"
    if summary.status == "killed":
        return f"{done}: its launcher is gone and nobody said why{_goes_on(run)}"
    failed = [member.name for member in run.members() if member.status == "failed"]
    return f"{done}: {', '.join(failed)} failed" if failed else done


def _stood_still(run: RunFolder) -> str:
    """What an observed job's watchdog said last, if the job took no step after it."""
    said = [event for event in run.events() if event.kind == "stall"]
    if not said:
        return ""
    steps = run.steps(said[-1].member)
    went_on = bool(steps) and steps[-1].end_seconds > said[-1].time_seconds
    return "" if went_on else said[-1].text.rstrip(".")


def _goes_on(run: RunFolder) -> str:
    try:
        saved = checkpoints.choose(run.path)
    except PacelineError:
        return ""
    return f"; --resume {run.path} goes on after step {saved.manifest.step}"


def lost(facts: Facts) -> str:
    """Who was lost while the others went on, or all began again; empty when nobody was."""
    if facts.summary.status != "finished":
        return ""
    texts = [event.text.rstrip(".") for event in facts.events if event.kind in ("lost", RESTART)]
    more = f", and {len(texts) - 1} more such" if len(texts) > 1 else ""
    return f"{texts[0]}{more}" if texts else ""
