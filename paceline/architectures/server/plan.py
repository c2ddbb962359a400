"""From a model and an optimizer to a plan: what is exchanged, in which chunks, served by whom."""

import hashlib
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from paceline import protocol, spec
from paceline.architectures.server.control import Plan
from paceline.architectures.server.memory import DTYPES, is_dense
from paceline.architectures.server.updates import describe
from paceline.errors import ExchangeError, SpecError
from paceline.launch import Identity
from paceline.protocol import ParameterSize
from paceline.protocol.placement import (
    LOOPBACK_CHUNK_BYTES,
    SHARED_CHUNK_BYTES,
    TRAVELLING_CHUNK_BYTES,
)

Named = Sequence[tuple[str, torch.nn.Parameter]]


def trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """What is exchanged: parameters that want gradients, tied ones once, in order of definition."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            problem = f"{name or 'the model'} makes sparse gradients, and chunks are dense."
            raise SpecError("architecture server", problem, "build the layer with sparse=False.")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, parameter in named:
        kind = str(parameter.dtype).removeprefix("torch.")
        if kind not in DTYPES:
            fix = f"use one of {', '.join(DTYPES)}, or freeze it."
            raise SpecError("architecture server", f"{name} holds {kind} numbers.", fix)
        if not is_dense(parameter):
            fix = "make it so: parameter.data = parameter.data.contiguous()."
            raise SpecError("architecture server", f"{name} has gaps in memory.", fix)
        if parameter.device.type != "cpu":
            problem = f"{name} is on {parameter.device}, and servers work in main memory."
            raise SpecError("architecture server", problem, "use ring on accelerators.")
    return named


def make_plan(
    named: Named,
    optimizer: Optimizer,
    options: spec.Server,
    identity: Identity,
) -> Plan:
    """The plan worker 0 publishes."""
    groups = _groups(named, optimizer)
    sizes = [
        ParameterSize(
            name=name,
            elements=p.numel(),
            element_bytes=p.element_size(),
            kind=str(p.dtype).removeprefix("torch."),
            group=group,
        )
        for (name, p), group in zip(named, groups, strict=True)
    ]
    seats = protocol.seats(placement_of(options, identity), identity.workers, identity.servers)
    shared = shares_memory(options, identity)
    wanted = options.chunk_bytes
    preferred, least = (wanted, wanted) if wanted else suitable_bytes(shared, identity)
    shares = [seat.share for seat in seats]
    layout, owners = protocol.cut_and_deal(sizes, shares, preferred, least)
    kind, settings = describe(optimizer) if options.update == "server" else ("", [])
    return Plan(
        layout=layout,
        fingerprint=fingerprint(named, groups),
        owners=owners,
        seats=seats,
        shared=shared,
        optimizer=kind,
        groups=settings,
    )


def check_plan(plan: Plan, named: Named, optimizer: Optimizer) -> None:
    """This worker's model must be the one the plan was made for."""
    if fingerprint(named, _groups(named, optimizer)) == plan.fingerprint:
        return
    theirs = [(size.name, size.elements) for size in plan.layout.parameters]
    ours = [(name, parameter.numel()) for name, parameter in named]
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


def fingerprint(named: Named, groups: Sequence[int]) -> str:
    facts = [
        (name, tuple(p.shape), p.stride(), str(p.dtype), group)
        for (name, p), group in zip(named, groups, strict=True)
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _groups(named: Named, optimizer: Optimizer) -> list[int]:
    group_of = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    absent = [name for name, parameter in named if id(parameter) not in group_of]
    if absent:
        problem = f"{absent[0]} wants gradients and is in no group of the optimizer."
        fix = "give it to the optimizer, or set requires_grad = False."
        raise SpecError("architecture server", problem, fix)
    return [group_of[id(parameter)] for _, parameter in named]
