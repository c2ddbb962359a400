"""How members agree on the next weights: one structure per architecture, named as it is typed.

`parse_architecture("server:mode=async")` and the TOML table `[architecture]` with `name = "server"`
and `mode = "async"` give the same thing.
"""

from typing import Any, ClassVar, Literal

import msgspec

from paceline.errors import SpecError, suggest
from paceline.spec.base import LARGEST_QUANTITY, Spec, check_numbers, expected, require
from paceline.units import parse_bytes

LEAST_CHUNK_BYTES = 64
"""Below it a message about a chunk is larger than the chunk: most likely a unit was left out."""

Compression = Literal["none", "fp16", "bf16", "int8", "topk"]


class ArchitectureFacts(Spec, frozen=True, kw_only=True):
    """What all architectures say of themselves, beside their options."""

    is_one_process: ClassVar[bool] = False
    """It is one worker, however many devices that has."""

    takes_scripts: ClassVar[bool] = True
    """Any script may use it, not only the built-in loop."""

    takes_one_worker: ClassVar[bool] = True
    """A job of one worker may be written with it."""

    takes_recorded_passes: ClassVar[bool] = False
    """A GPU may replay both passes of a step: nobody must act inside of backward."""

    sums_in_host: ClassVar[bool] = False
    """Workers of a host sum in memory that they share, however many hosts there are."""

    @property
    def takes_servers(self) -> bool:
        """Server members have something to do in it."""
        return False

    @property
    def serving(self) -> "Server | None":
        """How seats serve what is exchanged, on servers or in workers; None where none do."""
        return None

    @property
    def is_served(self) -> bool:
        return self.serving is not None

    @property
    def waits_for_all(self) -> bool:
        """A step ends when every worker has done its part: the slowest sets the pace."""
        return True

    @property
    def exclusive(self) -> bool:
        """Weights stay unchanged until all workers have used them: it trains like `single`."""
        return True

    @property
    def takes_newcomers(self) -> bool:
        """A worker may join a job that runs, if there are servers."""
        return False

    @property
    def survives(self) -> bool:
        """Workers can go on in place without one that was lost (`on_loss = "continue"`)."""
        return False

    @property
    def regroups(self) -> bool:
        """It is the workers that agree then how to go on; else it is the servers."""
        return self.survives and not self.is_served


class Auto(ArchitectureFacts, frozen=True, kw_only=True, tag_field="name", tag="auto"):
    """Paceline picks one and says why."""

    @property
    def takes_servers(self) -> bool:
        return True


class Single(ArchitectureFacts, frozen=True, kw_only=True, tag_field="name", tag="single"):
    """One worker: the baseline and the numerical reference."""

    is_one_process: ClassVar[bool] = True
    takes_recorded_passes: ClassVar[bool] = True


class Ring(ArchitectureFacts, frozen=True, kw_only=True, tag_field="name", tag="ring"):
    """Synchronous all-reduce of gradients, bucketed, overlapped with backward."""

    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    bucket: str = "auto"
    """Gradients that travel together; `auto` is 25 MiB, after a small first one, so that the
    exchange starts early (protocol/buckets.py)."""

    def __post_init__(self) -> None:
        if self.bucket != "auto":
            parse_bytes(self.bucket, "architecture ring, bucket")

    @property
    def bucket_bytes(self) -> int | None:
        """None for `auto`."""
        if self.bucket == "auto":
            return None
        return parse_bytes(self.bucket, "architecture ring, bucket")

    @property
    def survives(self) -> bool:
        return self.backend != "nccl"


class Server(ArchitectureFacts, frozen=True, kw_only=True, tag_field="name", tag="server"):
    """Workers push gradient chunks; servers update and return weights."""

    takes_recorded_passes: ClassVar[bool] = True

    mode: Literal["sync", "async", "bounded", "quorum"] = "sync"
    staleness: int = 3
    """`bounded`: how many steps a worker may be ahead of the slowest."""

    staleness_aware: bool = False
    """`async` and `bounded`: divide the learning rate of each update by 1 + its staleness."""

    quorum: int | None = None
    """`quorum`: how many workers' gradients make a step; all but one when left out."""

    placement: Literal["dedicated", "colocated", "optimal"] = "dedicated"
    update: Literal["auto", "server", "worker"] = "auto"
    """Where the optimizer runs; `worker` leaves only the averaging to the servers, `auto` decides
    by what the script's first step does with its gradients."""

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
        size = self.chunk_bytes
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
            problem = f"{name} = {_option(given)} has no effect with {other} = {beside}."
            fix = f"leave it out, or write {' or '.join(f'{other}={value}' for value in values)}."
            require(given == defaults[name] or beside in values, where, problem, fix)
        problem = "staleness_aware = true has no effect with staleness = 0: no gradient is stale."
        fix = "leave it out, or write staleness=1 or more."
        require(not (self.staleness_aware and self.exclusive), where, problem, fix)

    def changed(self, **options: Any) -> "Server":
        """The same with other options, without those that have no effect beside them."""
        return Server(**self.effective({**msgspec.structs.asdict(self), **options}))

    @classmethod
    def effective(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Without those that have no effect beside the others."""
        beside = {"mode": "sync", "compression": "none", **options}
        idle = {name for name, (other, values) in cls._needs.items() if beside[other] not in values}
        idle |= {"quorum"} if options.get("quorum") == 0 else set()
        in_step = beside["mode"] == "bounded" and beside.get("staleness") == 0
        idle |= {"staleness_aware"} if in_step else set()
        return {name: value for name, value in options.items() if name not in idle}

    @property
    def chunk_bytes(self) -> int | None:
        """Target size of a chunk; None leaves it to the transport."""
        if self.chunk == "auto":
            return None
        return parse_bytes(self.chunk, "architecture server, chunk")

    @property
    def takes_servers(self) -> bool:
        return self.placement != "colocated"

    @property
    def serving(self) -> "Server":
        return self

    @property
    def waits_for_all(self) -> bool:
        return self.mode in ("sync", "bounded")

    @property
    def takes_newcomers(self) -> bool:
        return self.placement == "dedicated" and self.update != "worker"

    @property
    def survives(self) -> bool:
        return self.placement == "dedicated" or self.mode == "sync"

    @property
    def exclusive(self) -> bool:
        return self.mode == "sync" or (self.mode == "bounded" and self.staleness == 0)


class Average(ArchitectureFacts, frozen=True, kw_only=True, tag_field="name", tag="average"):
    """Local steps, weights averaged every so often."""

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
    def exclusive(self) -> bool:
        return False

    @property
    def survives(self) -> bool:
        return self.backend != "nccl"


class Hybrid(ArchitectureFacts, frozen=True, kw_only=True, tag_field="name", tag="hybrid"):
    """Reduce inside a host through shared memory, between hosts by `between`."""

    sums_in_host: ClassVar[bool] = True

    between: Literal["ring", "server"] = "ring"

    @property
    def takes_servers(self) -> bool:
        return self.between == "server"

    @property
    def serving(self) -> Server | None:
        return Server(update="worker") if self.between == "server" else None

    @property
    def survives(self) -> bool:
        return self.between == "ring"


class Replicated(ArchitectureFacts, frozen=True, kw_only=True, tag_field="name", tag="replicated"):
    """One process, several devices, one batch split over them."""

    is_one_process: ClassVar[bool] = True

    devices: int = 0
    """Replicas; every GPU, or without one every core of this machine when left out."""

    shares: str = ""
    """Uneven parts of each batch, one weight per device, such as "3/1"; equal when left out."""

    def __post_init__(self) -> None:
        where = "architecture replicated"
        problem = f"devices = {self.devices} is negative."
        require(self.devices >= 0, where, problem, "write how many replicas there shall be.")
        assert self.share_weights is not None

    @property
    def share_weights(self) -> tuple[float, ...]:
        """The weights in numbers; empty for equal parts."""
        try:
            weights = tuple(float(part) for part in self.shares.split("/") if self.shares)
        except ValueError:
            weights = (-1.0,)
        problem = f'shares = "{self.shares}" are no weights.'
        fits = all(0 < weight <= LARGEST_QUANTITY for weight in weights)
        require(fits, "architecture replicated", problem, "write one for each device, as 3/1.")
        return weights


class Pipeline(ArchitectureFacts, frozen=True, kw_only=True, tag_field="name", tag="pipeline"):
    """Layers split over workers; micro-batches flow through."""

    takes_scripts: ClassVar[bool] = False
    takes_one_worker: ClassVar[bool] = False

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


Architecture = Auto | Single | Ring | Server | Average | Hybrid | Replicated | Pipeline

ARCHITECTURES: dict[str, type[Architecture]] = {
    "auto": Auto,
    "single": Single,
    "ring": Ring,
    "server": Server,
    "average": Average,
    "hybrid": Hybrid,
    "replicated": Replicated,
    "pipeline": Pipeline,
}


def architecture_name(architecture: Architecture) -> str:
    """The name the user types, "server"."""
    return str(architecture.__struct_config__.tag)


def parse_architecture(text: str, where: str = "--architecture") -> Architecture:
    """Return the structure for "name" or "name:key=value,key=value"."""
    name, _, options = text.partition(":")
    kind = ARCHITECTURES.get(name)
    if kind is None:
        raise SpecError(where, f'"{name}" is not an architecture.', suggest(name, ARCHITECTURES))
    fields: dict[str, str] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            fix = f'write "{name}:{key}=…", or leave it out.'
            raise SpecError(where, f'option "{option}" of {name} has no value.', fix)
        if key not in kind.__struct_fields__:
            fix = (
                suggest(key, kind.__struct_fields__) if kind.__struct_fields__ else "leave it out."
            )
            raise SpecError(where, f'"{key}" is not an option of {name}.', fix)
        if key in fields:
            raise SpecError(where, f'"{key}" of {name} is given twice.', "keep one of them.")
        fields[key] = value
    try:
        made = msgspec.convert({"name": name, **fields}, kind, strict=False)
        check_numbers(made, where)
        return made
    except msgspec.ValidationError as error:
        key = str(error).rpartition("$.")[2].rstrip("`")
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        problem = f'"{fields[key]}" is no value of {key}, an option of {name}.'
        raise SpecError(where, problem, f"write {expected(types[key])}.") from None


def format_architecture(architecture: Architecture) -> str:
    """The inverse of `parse_architecture`; options at their defaults are left out."""
    fields = dict(msgspec.to_builtins(architecture))
    name = fields.pop("name")
    options = ",".join(f"{key}={_option(value)}" for key, value in fields.items())
    return f"{name}:{options}" if options else str(name)


def _option(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
