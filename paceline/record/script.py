"""What to say about a script that ran on several workers and did not share its work."""

from collections.abc import Sequence

from paceline import spec
from paceline.record.entries import Member


def warning(experiment: spec.Experiment, members: Sequence[Member]) -> str:
    """A sentence when `init`, `distribute` or `shard` was never called; else empty.

    Every worker that called `init` left a record, with how often it called the other two.
    """
    script, workers = experiment.workload.script, experiment.cluster.workers
    if script is None or workers == 1:
        return ""
    own = [member.counters for member in members if member.role == "worker"]
    if not own:
        return (
            f"{script.name} never called paceline.init(): {workers} workers ran all of it, each "
            "for itself. Add the three lines (init, distribute, shard), or run it with -n 1."
        )
    counts = [found for counters in own if isinstance(found := counters.get("script"), dict)]
    if not counts:
        return ""
    if not any(count.get("distributed") for count in counts):
        return (
            f"{script.name} never called paceline.distribute(): {workers} workers trained apart, "
            "each its own model. Pass it the model and the optimizer after paceline.init()."
        )
    if not any(count.get("sharded") for count in counts):
        return (
            f"{script.name} never called paceline.shard(): unless it divides its data itself, all "
            f"{workers} workers read the same samples. Pass it the data loader."
        )
    return ""
