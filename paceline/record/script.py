"""Sentences about a script that ran on several workers and did not share its work."""

from collections.abc import Mapping, Sequence

from paceline import spec
from paceline.record.entries import MemberRecord


def warning(
    experiment: spec.Experiment, members: Sequence[MemberRecord], steps: Mapping[str, int]
) -> str:
    """A sentence when `init`, `distribute`, `shard` or a step was never called; else empty.

    Every worker that called `init` left a record, with how often it called the other two. `steps`
    are those that each worker took: in step, all take as many.
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
    if counts and not any(count.get("distributed") for count in counts):
        return (
            f"{script.name} never called paceline.distribute(): {workers} workers trained apart, "
            "each its own model. Pass it the model and the optimizer after paceline.init()."
        )
    if counts and not any(count.get("sharded") for count in counts):
        return (
            f"{script.name} never called paceline.shard(): unless it divides its data itself, all "
            f"{workers} workers read the same samples. Pass it the data loader."
        )
    if counts and steps and not any(steps.values()):
        return (
            f"{script.name} took no step of an optimizer that it gave to paceline.distribute(): "
            "nothing was exchanged, and what a worker changed by itself is its own. Have backward "
            "make the gradients, and the optimizer take the steps."
        )
    founders = {f"worker{rank}" for rank in range(workers)}
    # One who came to join may not have got in, or may leave.
    taken_by = {name: count for name, count in steps.items() if name in founders}
    if experiment.architecture.waits_for_all and len(set(taken_by.values())) > 1:
        taken = ", ".join(f"{name} {count}" for name, count in taken_by.items())
        return f"the workers took different numbers of steps ({taken}); each must take all of them."
    return ""
