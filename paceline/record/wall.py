"""Parts of the time of a run from its start to its end, on one worker; nothing is left out."""

from collections.abc import Mapping, Sequence

from paceline.record.entries import MemberRecord, Step

Span = tuple[float, float]
"""The beginning and end of a job, on worker 0's clock."""

START_UP, FIRST_STEPS, STEPS, TEARDOWN = "start-up", "first steps", "steps", "teardown"


def wall_seconds(
    workers: Sequence[MemberRecord],
    steps: Mapping[str, Sequence[Step]],
    warmup_steps: int,
    span: Span | None = None,
) -> dict[str, float]:
    """Part -> seconds, in the order in which they come; pauses are named by what they were for.

    Start-up is all before the first batch was asked for; first steps are those no figure counts.
    """
    worker = next(member for member in workers if member.name in steps)
    own = steps[worker.name]
    few = min(warmup_steps, len(own) - 1)
    paused: dict[str, float] = {}
    for one in (*(step.paused_seconds for step in own), worker.paused_seconds):
        for what, seconds in one.items():
            paused[what] = paused.get(what, 0.0) + seconds
    begins = own[0].start_seconds - sum(own[0].paused_seconds.values())
    ends = own[-1].end_seconds
    began, ended = span or (worker.began_seconds, worker.ended_seconds)
    parts = {
        START_UP: begins - (begins if began is None else began),
        FIRST_STEPS: sum(step.seconds for step in own[:few]),
        STEPS: sum(step.seconds for step in own[few:]),
        **paused,
    }
    last_pauses = sum(worker.paused_seconds.values())
    ended = ends + last_pauses if ended is None else ended
    parts[TEARDOWN] = ended - ends - last_pauses
    # Steps of a run that went on after a pause nobody recorded leave a gap; it is not hidden.
    gap = ended - (begins if began is None else began) - sum(parts.values())
    if gap > 1e-3:
        parts["unaccounted"] = gap
    return {what: max(0.0, seconds) for what, seconds in parts.items() if seconds > 0}
