"""Architectures that sum over all workers: `ring`, `average` and `hybrid`."""

from typing import ClassVar, Literal

from paceline.spec.base import Spec, require
from paceline.spec.facts import ArchitectureFacts, ring_copies
from paceline.spec.server import Server
from paceline.units import parse_bytes


class Ring(ArchitectureFacts, Spec, frozen=True, kw_only=True, tag_field="name", tag="ring"):
    """Synchronous all-reduce of gradients, bucketed, overlapped with backward."""

    built_by: ClassVar[str] = "paceline.architectures.ring:build"
    predicted_by: ClassVar[str] = "paceline.predict.collective_step:SYNCHRONOUS"
    is_all_reduce: ClassVar[bool] = True
    takes_scripts: ClassVar[bool] = True
    takes_tensorflow: ClassVar[bool] = True
    piece_option: ClassVar[str] = "bucket"

    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    bucket: str = "auto"
    """Gradients that travel together; `auto` is 25 MiB, after a small first one, so that the
    exchange starts early (protocol/buckets.py)."""

    def __post_init__(self) -> None:
        if self.bucket != "auto":
            parse_bytes(self.bucket, "architecture ring, bucket")

    @property
    def piece_bytes(self) -> int | None:
        if self.bucket == "auto":
            return None
        return parse_bytes(self.bucket, "architecture ring, bucket")

    @property
    def takes_newcomers(self) -> bool:
        return self.backend in ("auto", "gloo")

    @property
    def survives(self) -> bool:
        return self.backend != "nccl"

    @property
    def waits_for_all(self) -> bool:
        return True

    @property
    def exclusive(self) -> bool:
        return True

    @property
    def collective(self) -> str:
        return self.backend

    def rounds(self, workers: int, hosts: int) -> float:
        return 2.0 * (workers - 1)

    def copies_sent(self, workers: int, state_numbers: int) -> float:
        return ring_copies(workers)


class Average(ArchitectureFacts, Spec, frozen=True, kw_only=True, tag_field="name", tag="average"):
    """Local steps, weights averaged every so often."""

    built_by: ClassVar[str] = "paceline.architectures.average:AverageArchitecture"
    predicted_by: ClassVar[str] = "paceline.predict.average_step:AVERAGED"
    takes_scripts: ClassVar[bool] = True
    takes_tensorflow: ClassVar[bool] = True

    every: int = 1
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    state: bool = False
    """Average the optimizer's state too."""

    outer: Literal["none", "nesterov"] = "none"
    """An optimizer over the averages; `nesterov` makes it DiLoCo."""

    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    overlap: bool = False
    """Let the averaging run during the next local steps and apply it one round late."""

    def __post_init__(self) -> None:
        where = "architecture average"
        problem = f"every = {self.every} is not at least 1."
        require(self.every >= 1, where, problem, "write 1 to average each step.")
        problem = f"outer_learning_rate = {self.outer_learning_rate:g} is not above zero."
        require(self.outer_learning_rate > 0, where, problem, "write 0.7.")
        problem = f"outer_momentum = {self.outer_momentum:g} is not in [0, 1)."
        require(0 <= self.outer_momentum < 1, where, problem, "write 0.9.")
        unused = (
            "outer_learning_rate and outer_momentum are of an outer optimizer, and there is none."
        )
        asked = (self.outer_learning_rate, self.outer_momentum) != (0.7, 0.9)
        require(self.outer != "none" or not asked, where, unused, "add outer=nesterov.")

    @property
    def waits_for_all(self) -> bool:
        return True

    @property
    def exclusive(self) -> bool:
        return False

    @property
    def averaging(self) -> "Average":
        return self

    @property
    def collective(self) -> str:
        return self.backend

    @property
    def takes_newcomers(self) -> bool:
        return self.backend in ("auto", "gloo") and not self.overlap

    @property
    def survives(self) -> bool:
        return self.backend != "nccl"

    def rounds(self, workers: int, hosts: int) -> float:
        return 2 * (workers - 1) / self.every

    def copies_sent(self, workers: int, state_numbers: int) -> float:
        summed = 1 + (state_numbers if self.state else 0)
        return summed * ring_copies(workers) / self.every


class Hybrid(ArchitectureFacts, Spec, frozen=True, kw_only=True, tag_field="name", tag="hybrid"):
    """Reduce inside a host through shared memory, between hosts by `between`."""

    built_by: ClassVar[str] = "paceline.architectures.hybrid:HybridArchitecture"
    served_by: ClassVar[str] = "paceline.architectures.hybrid:serve"
    takes_scripts: ClassVar[bool] = True
    takes_tensorflow: ClassVar[bool] = True
    sums_in_host: ClassVar[bool] = True

    between: Literal["ring", "server"] = "ring"

    @property
    def takes_servers(self) -> bool:
        return self.between == "server"

    @property
    def serving(self) -> Server | None:
        return Server(update="worker") if self.between == "server" else None

    @property
    def takes_newcomers(self) -> bool:
        return self.between == "ring"

    @property
    def survives(self) -> bool:
        return self.between == "ring"

    @property
    def waits_for_all(self) -> bool:
        return True

    @property
    def exclusive(self) -> bool:
        return True

    @property
    def predicted_by(self) -> str:  # type: ignore[override]
        served = self.between == "server"
        name = "server_step:SERVED" if served else "collective_step:SYNCHRONOUS"
        return f"paceline.predict.{name}"

    @property
    def collective(self) -> str:
        return "gloo" if self.between == "ring" else ""

    def rounds(self, workers: int, hosts: int) -> float:
        return 2.0 * (hosts - 1) if self.between == "ring" else 2.0

    def copies_sent(self, workers: int, state_numbers: int) -> float | None:
        return ring_copies(workers) if self.between == "ring" else None
