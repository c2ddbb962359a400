"""One life of a recorded run: the launcher starts the members and watches them until all have
ended."""

from collections.abc import Callable, Iterable, Sequence

from paceline.diagnose.stalls import Stalls
from paceline.launch.failures import MemberFailures
from paceline.launch.faults import Faults
from paceline.launch.local import supervise
from paceline.launch.process import MemberCommand, Output
from paceline.record import RunFolder
from paceline.record.following import Progress, StepCounter


def watch(
    commands: Sequence[MemberCommand],
    folder: RunFolder,
    faults: Faults,
    *,
    output: Output,
    progress: Progress,
    also: Sequence[Callable[[], None]] = (),
    dilation: float = 1.0,
    goes_on: bool = False,
    replacements: Iterable[MemberCommand] = (),
) -> None:
    """Run all members to their end; `also` is called several times a second beside our own.
    `goes_on`: a failed worker ends no other member, and one of the `replacements` is started
    instead."""

    def say(text: str) -> None:
        output("paceline", "stderr", f"{text}\n".encode())

    followed = folder.experiment().cluster.workers if goes_on else 1
    foremost = _Foremost(progress)
    counters = [StepCounter(folder, foremost, f"worker{rank}") for rank in range(followed)]
    failures = MemberFailures(folder, say, replacements) if goes_on else None
    stalls = Stalls(folder, say, dilation, () if failures is None else failures.outlived)

    def tick() -> None:
        for count in counters:
            count()
        faults()
        stalls()
        for look in also:
            look()

    def started(name: str, pid: int) -> None:
        faults.started(name, pid)
        stalls.started(name, pid)

    logs = folder.path / "logs"
    supervise(commands, output=output, tick=tick, started=started, logs=logs, failures=failures)
    if failures is not None:
        failures.record(dilation)


class _Foremost:
    """Report the progress of the worker that is furthest: any worker may fail."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._steps = progress, 0

    def __call__(self, steps: int) -> None:
        if steps > self._steps:
            self._steps = steps
            self._progress(steps)
