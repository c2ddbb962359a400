"""The profile of an observed job: what `paceline predict --from RUN` takes for its device.

A job is seen from outside, so its layers are the buckets that it sums: each has its bytes, and of
forward and backward the share that its bytes have.
"""

from collections import Counter
from collections.abc import Sequence

from paceline.errors import SpecError
from paceline.explain.facts import WorkerFacts, gather
from paceline.record import CollectiveCall, RunFolder, Step
from paceline.record.entries import OBSERVED
from paceline.spec.profile import DeviceProfile, Layer

SUMS = ("all_reduce", "allreduce", "allreduce_coalesced")


def profile_of(run: RunFolder) -> DeviceProfile:
    """Times and bytes of a step of the typical rank; SpecError where the run does not tell them."""
    summary = run.summary()
    if summary.engine != OBSERVED:
        problem = f"{run.path} is a run of Paceline, which knows its layers."
        raise SpecError("--from", problem, "profile the model: paceline profile --help.")
    facts = gather(run)
    typical = facts.typical
    buckets = _buckets(run.collectives(typical.name), typical.entries)
    if not buckets or summary.architecture not in ("ddp", "collectives"):
        problem = f"{run.path} shows no step in which ranks sum whole gradients."
        fix = "observe a job on DDP, or give the model with --model and --device."
        raise SpecError("--from", problem, fix)
    return DeviceProfile(
        device="observed",
        model=summary.name or "observed",
        batch=max(1, round(typical.samples)),
        input_shape=(1,),
        kind="measured",
        source=f"observed steps of {run.path.name}: {typical.steps} of {typical.name}",
        layers=tuple(_layers(buckets, typical)),
    )


def _buckets(calls: Sequence[CollectiveCall], steps: Sequence[Step]) -> tuple[int, ...]:
    """Bytes of the sums of a typical step, in the order in which they were made."""
    seen: Counter[tuple[int, ...]] = Counter()
    for step in steps:
        own = [
            call.bytes
            for call in calls
            if step.start_seconds <= call.arrived_seconds < step.end_seconds
            and call.name in SUMS
            and call.bytes
        ]
        seen[tuple(own)] += bool(own)
    return seen.most_common(1)[0][0] if seen and seen.most_common(1)[0][1] else ()


def _layers(buckets: Sequence[int], worker: WorkerFacts) -> list[Layer]:
    """Backward makes the last layers' gradients first, so buckets come in reverse."""
    whole = sum(buckets)
    return [
        Layer(
            name=f"bucket{number}",
            forward_seconds=worker.phases["forward"] * size / whole,
            backward_seconds=worker.phases["backward"] * size / whole,
            parameter_bytes=size,
        )
        for number, size in enumerate(reversed(buckets))
    ]
