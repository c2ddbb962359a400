"""From a model and an optimizer to a plan: what is exchanged, in which chunks, served by whom."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import protocol, spec
from paceline.architectures.server.control import Plan, Settings
from paceline.architectures.server.memory import DTYPES, is_dense
from paceline.errors import ExchangeError, SpecError
from paceline.launch import Identity
from paceline.protocol import ParameterSize
from paceline.protocol.placement import (
    LOOPBACK_CHUNK_BYTES,
    SHARED_CHUNK_BYTES,
    TRAVELLING_CHUNK_BYTES,
)


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What one exchange is for: tensors, and the optimizer that may run on servers."""

    names: Sequence[str]
    tensors: Sequence[Tensor]
    groups: Sequence[int]
    """Of each tensor, its group in the optimizer; 0 where servers only average."""

    optimizer: str
    """The torch class that may run on servers; empty when they only average."""

    settings: list[Settings]

    def __post_init__(self) -> None:
        for name, tensor in zip(self.names, self.tensors, strict=True):
            kind = str(tensor.dtype).removeprefix("torch.")
            if kind not in DTYPES:
                fix = f"use one of {', '.join(DTYPES)}, or freeze it."
                raise SpecError("architecture server", f"{name} holds {kind} numbers.", fix)
            if not is_dense(tensor):
                fix = "make it so: parameter.data = parameter.data.contiguous()."
                raise SpecError("architecture server", f"{name} has gaps in memory.", fix)
            if tensor.device.type != "cpu":
                problem = f"{name} is on {tensor.device}, and servers work in main memory."
                raise SpecError("architecture server", problem, "use ring on accelerators.")

    @property
    def fingerprint(self) -> str:
        facts = [
            (name, tuple(t.shape), t.stride(), str(t.dtype), group)
            for name, t, group in zip(self.names, self.tensors, self.groups, strict=True)
        ]
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def refuse_sparse(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            problem = f"{name or 'the model'} makes sparse gradients, and chunks are dense."
            raise SpecError("architecture server", problem, "build the layer with sparse=False.")


def make_plan(exchanged: Exchanged, options: spec.Server, identity: Identity) -> Plan:
    """The plan worker 0 publishes."""
    named = zip(exchanged.names, exchanged.tensors, exchanged.groups, strict=True)
    sizes = [
        ParameterSize(
            name=name,
            elements=tensor.numel(),
            element_bytes=tensor.element_size(),
            kind=str(tensor.dtype).removeprefix("torch."),
            group=group,
        )
        for name, tensor, group in named
    ]
    seats = protocol.seats(placement_of(options, identity), identity.workers, identity.servers)
    shared = shares_memory(options, identity)
    wanted = options.chunk_bytes
    preferred, least = (wanted, wanted) if wanted else suitable_bytes(shared, identity)
    shares = [seat.share for seat in seats]
    layout, owners = protocol.cut_and_deal(sizes, shares, preferred, least)
    return Plan(
        layout=layout,
        fingerprint=exchanged.fingerprint,
        owners=owners,
        seats=seats,
        shared=shared,
        optimizer=exchanged.optimizer,
        groups=exchanged.settings,
    )


def check_plan(plan: Plan, exchanged: Exchanged) -> None:
    """This worker's model must be the one the plan was made for."""
    if exchanged.fingerprint == plan.fingerprint:
        return
    theirs = [(size.name, size.elements) for size in plan.layout.parameters]
    ours = [(n, t.numel()) for n, t in zip(exchanged.names, exchanged.tensors, strict=True)]
    pairs = [(a, b) for a, b in zip(theirs, ours, strict=False) if a != b]
    told = f"{pairs[0][0]} there, {pairs[0][1]} here" if pairs else "layout or groups"
    raise ExchangeError(
        f"this worker's model differs from worker 0's ({told}); build the same model everywhere."
    )


def placement_of(options: spec.Server, identity: Identity) -> protocol.placement.Placement:
    """`dedicated` without any server means that the workers serve."""
    lacks_servers = options.placement == "dedicated" and identity.servers == 0
    return "colocated" if lacks_servers else options.placement


def shares_memory(options: spec.Server, identity: Identity) -> bool:
    if options.transport == "shm" and not identity.on_one_host:
        problem = "transport = shm, and the members are on several hosts."
        raise SpecError("architecture server", problem, "write transport=tcp, or leave it out.")
    return identity.on_one_host if options.transport == "auto" else options.transport == "shm"


def suitable_bytes(shared: bool, identity: Identity) -> tuple[int, int]:
    """The size of a chunk that suits the way it goes, and the least that makes sense."""
    if shared:
        return SHARED_CHUNK_BYTES
    return LOOPBACK_CHUNK_BYTES if identity.on_one_host else TRAVELLING_CHUNK_BYTES
