"""The learning rate of a step: a pure function of the step, so resuming needs no state."""

import math

from paceline import spec


def learning_rate(
    workload: spec.Workload,
    *,
    step: int,
    num_steps: int,
    workers: int,
    replicas: int | None = None,
) -> float:
    """The rate that `step` of `num_steps` is taken with.

    `replicas`: where workers share the model's layers, how many take samples of their own.
    """
    schedule = workload.schedule
    factor = replicas or workers
    rate = workload.optimizer.learning_rate * (factor if schedule.scale_with_workers else 1)
    if schedule.base_batch:
        rate *= workload.global_batch_for(workers) / schedule.base_batch
    if step < schedule.warmup_steps:
        return rate * (0.1 + 0.9 * step / schedule.warmup_steps)
    if schedule.name == "step":
        return rate * float(schedule.factor ** (step // schedule.every_steps))
    if schedule.name == "cosine":
        span = max(1, num_steps - schedule.warmup_steps)
        return rate * 0.5 * (1 + math.cos(math.pi * (step - schedule.warmup_steps) / span))
    return rate
