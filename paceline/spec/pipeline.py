"""The architecture `pipeline`: what a user may write of it, what it refuses, and its facts."""

import math
from typing import ClassVar, Literal

from paceline.spec.base import Spec, require
from paceline.spec.cluster import Cluster
from paceline.spec.facts import ArchitectureFacts
from paceline.spec.workload import Workload
from paceline.units import parse_bytes


class Pipeline(
    ArchitectureFacts, Spec, frozen=True, kw_only=True, tag_field="name", tag="pipeline"
):
    """Layers split over workers; micro-batches flow through."""

    built_by: ClassVar[str] = "paceline.architectures.pipeline:PipelineArchitecture"
    predicted_by: ClassVar[str] = "paceline.predict.pipeline_step:PIPELINED"
    takes_one_worker: ClassVar[bool] = False
    divides_model: ClassVar[bool] = True

    microbatches: int = 4
    """Equal parts of a batch that are in the pipeline at once."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """`gpipe`: all forward, then all backward. `1f1b`: a worker turns to backward as soon as it
    can, so fewer parts wait in memory. `interleaved`: as 1f1b, with `loops` stages on each worker,
    which shortens the idle time at both ends."""

    loops: int = 2
    """`interleaved`: stages on each worker."""

    replicas: int = 1
    """Pipelines side by side, gradients averaged between them; workers = stages x replicas."""

    memory: str = ""
    """What one worker has for weights, gradients, optimizer and activations, such as 2GiB; stages
    are cut to fit."""

    def __post_init__(self) -> None:
        where = "architecture pipeline"
        for name in ("microbatches", "loops", "replicas"):
            problem = f"{name} = {getattr(self, name)} is not at least 1."
            require(getattr(self, name) >= 1, where, problem, f"write a {name} above zero.")
        if self.memory:
            parse_bytes(self.memory, "architecture pipeline, memory")

    @property
    def memory_bytes(self) -> int | None:
        """None for no limit."""
        return parse_bytes(self.memory, "architecture pipeline, memory") if self.memory else None

    @property
    def stages_per_worker(self) -> int:
        return self.loops if self.schedule == "interleaved" else 1

    @property
    def waits_for_all(self) -> bool:
        return True

    @property
    def exclusive(self) -> bool:
        return True

    @property
    def staging(self) -> "Pipeline":
        return self

    def rounds(self, workers: int, hosts: int) -> float:
        stages = workers // self.replicas * self.stages_per_worker
        return 2.0 * (stages - 1) + 2.0 * (self.replicas - 1)

    def check(self, workload: Workload, cluster: Cluster) -> None:
        where, workers = "architecture pipeline", cluster.workers
        problem = f"workers = {workers} make no {self.replicas} pipelines of two stages or more."
        stages, left = divmod(workers, self.replicas)
        fix = f"write workers = {2 * self.replicas}: stages x replicas."
        require(stages >= 2 and not left, where, problem, fix)
        problem = f"microbatches = {self.microbatches}, but 1f1b fills its {stages} stages first."
        full = self.schedule != "1f1b" or self.microbatches >= stages
        require(full, where, problem, f"write microbatches={stages} or more, or schedule=gpipe.")
        rounds = max(1, self.microbatches // stages)
        problem = f"interleaved, {self.microbatches} microbatches make no equal rounds of about "
        problem += f"{stages}, one for each of the workers of a pipeline."
        whole = self.schedule != "interleaved" or self.microbatches % rounds == 0
        require(whole, where, problem, f"write microbatches={stages * rounds}.")
        total, parts = workload.global_batch_for(workers), self.replicas * self.microbatches
        problem = f"a global batch of {total} does not divide into {parts} equal parts."
        even = parts * (total // parts or 1)
        each = parts // math.gcd(parts, workers)
        fix = f"write global_batch = {even}, or for batch a multiple of {each}."
        require(total % parts == 0, where, problem, fix)
        self._refuse_unlike(workload, cluster)

    def _refuse_unlike(self, workload: Workload, cluster: Cluster) -> None:
        unlike = {
            "accumulate": (workload.accumulate > 1, "microbatches accumulate already"),
            "compile": (workload.compile, "the stages are cut from the model as it is"),
            "resume": (bool(workload.resume), "a checkpoint holds a whole model"),
            "checkpoint_every": (workload.checkpoint_every > 0, "no worker has the whole model"),
            "evaluate": (workload.evaluate, "no worker has the whole model"),
            "balance": (cluster.balance, "stages are cut by measured time as it is"),
            "shares": (bool(cluster.shares), "every stage sees the whole batch"),
            "reading": (workload.reading != "each", "the first and the last stage read"),
        }
        for name, (asked, reason) in unlike.items():
            require(
                not asked,
                "architecture pipeline",
                f"{name} does not go with it: {reason}.",
                "leave it out.",
            )
