"""The architecture `server`: the options of parameter servers, and their facts."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from paceline.spec.base import Spec, require, written
from paceline.spec.cluster import Cluster
from paceline.spec.facts import ArchitectureFacts
from paceline.spec.workload import GradientUse, Workload
from paceline.units import parse_bytes

LEAST_CHUNK_BYTES = 64
"""Below it a message about a chunk is larger than the chunk: most likely a unit was left out."""

Compression = Literal["none", "fp16", "bf16", "int8", "topk"]

Leaving = Literal["for means", "as made", "held", "at step"]
"""When gradients leave for servers. `for means`: in backward, and workers update. In the other
three servers update: as soon as all gradients are there, when the workers call `optimizer.step()`,
and with gradients that leave only then."""


class Server(ArchitectureFacts, Spec, frozen=True, kw_only=True, tag_field="name", tag="server"):
    """Workers push gradient chunks; servers update and return weights."""

    built_by: ClassVar[str] = "paceline.architectures.server:build"
    served_by: ClassVar[str] = "paceline.architectures.server:serve"
    predicted_by: ClassVar[str] = "paceline.predict.server_step:SERVED"
    takes_scripts: ClassVar[bool] = True
    takes_recorded_passes: ClassVar[bool] = True
    takes_tensorflow: ClassVar[bool] = True
    piece_option: ClassVar[str] = "chunk"

    mode: Literal["sync", "async", "bounded", "quorum"] = "sync"
    staleness: int = 3
    """`bounded`: how many steps a worker may be ahead of the slowest."""

    staleness_aware: bool = False
    """`async` and `bounded`: divide the learning rate of each update by 1 + its staleness."""

    quorum: int | None = None
    """`quorum`: how many workers' gradients make a step; all but one when left out."""

    placement: Literal["dedicated", "colocated", "optimal"] = "dedicated"
    update: Literal["auto", "server", "worker"] = "auto"
    """Where the optimizer runs. `worker`: servers only average, and each worker updates its own
    weights. `server`: servers update, and a layer waits for its weights in the next forward pass;
    the script must not use its gradients or change its weights. `auto`: see `gradients_leave`."""

    transport: Literal["auto", "shm", "tcp"] = "auto"
    chunk: str = "auto"
    window: int = 2
    """Chunks for each server that may wait for the network to take them, in all; more delay urgent
    ones."""

    encrypt: bool = True
    """Between real hosts; `false` on a network you trust, as gloo and MPI do: it costs CPU."""

    compression: Compression = "none"
    topk_fraction: float = 0.01

    _needs: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {
        "staleness": ("mode", ("bounded",)),
        "staleness_aware": ("mode", ("async", "bounded")),
        "quorum": ("mode", ("quorum",)),
        "topk_fraction": ("compression", ("topk",)),
    }
    """Options that have an effect with some values of another one only."""

    def __post_init__(self) -> None:
        where = "architecture server"
        problem = f"staleness = {self.staleness} is negative."
        require(self.staleness >= 0, where, problem, "write 0 (equal to sync) or more.")
        problem = f"window = {self.window} is not at least 1."
        require(self.window >= 1, where, problem, "write 2.")
        problem = f"quorum = {self.quorum} is not at least 1."
        enough = self.quorum is None or self.quorum >= 1
        require(enough, where, problem, "write how many workers' gradients count.")
        problem = f"topk_fraction = {self.topk_fraction:g} is not in (0, 1]."
        require(0 < self.topk_fraction <= 1, where, problem, "write 0.01 for one percent.")
        size = self.piece_bytes
        problem = f"chunk = {self.chunk} is less than {LEAST_CHUNK_BYTES} bytes."
        fits = size is None or size >= LEAST_CHUNK_BYTES
        require(fits, where, problem, "write it with its unit, as 256KiB, or leave it out.")
        problem = f"update = worker with mode = {self.mode}: weights would drift apart."
        together = self.update != "worker" or self.exclusive
        require(together, where, problem, "leave update out, or write mode=sync.")
        self._refuse_without_effect(where)

    def _refuse_without_effect(self, where: str) -> None:
        defaults = {field.name: field.default for field in msgspec.structs.fields(Server)}
        for name, (other, values) in self._needs.items():
            given, beside = getattr(self, name), getattr(self, other)
            problem = f"{name} = {written(given)} has no effect with {other} = {beside}."
            fix = f"leave it out, or write {' or '.join(f'{other}={value}' for value in values)}."
            require(given == defaults[name] or beside in values, where, problem, fix)
        problem = "staleness_aware = true has no effect with staleness = 0: no gradient is stale."
        fix = "leave it out, or write staleness=1 or more."
        require(not (self.staleness_aware and self.exclusive), where, problem, fix)

    @classmethod
    def effective(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Without those that have no effect beside the others."""
        beside = {"mode": "sync", "compression": "none", **options}
        idle = {name for name, (other, values) in cls._needs.items() if beside[other] not in values}
        idle |= {"quorum"} if options.get("quorum") == 0 else set()
        in_step = beside["mode"] == "bounded" and beside.get("staleness") == 0
        idle |= {"staleness_aware"} if in_step else set()
        return {name: value for name, value in options.items() if name not in idle}

    @property
    def piece_bytes(self) -> int | None:
        if self.chunk == "auto":
            return None
        return parse_bytes(self.chunk, "architecture server, chunk")

    @property
    def takes_servers(self) -> bool:
        return self.placement != "colocated"

    @property
    def needs_servers(self) -> bool:
        return self.takes_servers

    @property
    def serving(self) -> "Server":
        return self

    @property
    def waits_for_all(self) -> bool:
        return self.mode in ("sync", "bounded")

    def gradients_leave(self, use: GradientUse | None) -> Leaving:
        """When gradients leave a worker, and who updates; it holds for the whole job. `use`: what
        the training loop does with gradients; None for a script, which may do anything."""
        if self.exclusive:
            if self.update == "worker" or (self.update == "auto" and use is None):
                return "for means"
            return "held" if use == "clip" else "as made"
        knows = use == "nothing" or (use is None and self.update == "server")
        return "as made" if knows else "at step"

    @property
    def takes_newcomers(self) -> bool:
        return self.placement == "dedicated" and self.update != "worker"

    @property
    def survives(self) -> bool:
        return self.placement == "dedicated" or self.mode == "sync"

    @property
    def exclusive(self) -> bool:
        return self.mode == "sync" or (self.mode == "bounded" and self.staleness == 0)

    def rounds(self, workers: int, hosts: int) -> float:
        return 2.0

    def check(self, workload: Workload, cluster: Cluster) -> None:
        where = "architecture server"
        problem = f"servers = {cluster.servers}, but colocated workers serve themselves."
        colocated = self.placement == "colocated"
        fix = "leave servers out, or write placement=dedicated."
        require(not (colocated and cluster.servers), where, problem, fix)
        problem = f"quorum = {self.quorum} of {cluster.workers} workers."
        fits = (self.quorum or 0) <= cluster.workers
        require(fits, where, problem, "ask for at most as many as there are workers.")
