"""What torch knows of an exchange: from tensors and an optimizer to the sizes of a plan."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from paceline import spec
from paceline.collectives.context import Context
from paceline.errors import ExchangeError, SpecError
from paceline.launch import Identity
from paceline.protocol.chunks import ParameterSize
from paceline.protocol.messages import Settings
from paceline.protocol.plan import Shape, make_plan, placement_of, why_no_second_homes
from paceline.served.device import check_devices, is_apart
from paceline.served.job_plan import JobPlan
from paceline.served.memory import DTYPES, is_dense


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
        check_devices(self.names, self.tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device if self.tensors else torch.device("cpu")

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


def note_members(options: spec.Server, context: Context, device: torch.device) -> None:
    """Record what the members of this job mean for it, where a user may not expect it."""
    shape = shape_of(context.identity, accelerated=is_apart(device))
    if placement_of(options, shape) != options.placement:
        context.note("no servers were asked for: the workers serve (colocated).")
    if context.identity.goes_on and (why := why_no_second_homes(options, shape)):
        context.note(f"the failure of a server stops the job: {why}.")


def shape_of(identity: Identity, *, accelerated: bool = False) -> Shape:
    return Shape(
        workers=identity.workers,
        servers=identity.servers,
        hosts=(0,) * identity.members if identity.on_one_host else (),
        goes_on=identity.goes_on,
        accelerated=accelerated,
    )


def make_job_plan(exchanged: Exchanged, options: spec.Server, identity: Identity) -> JobPlan:
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
    shape = shape_of(identity, accelerated=is_apart(exchanged.device))
    plan = make_plan(sizes, options, shape, exchanged.settings)
    return JobPlan(
        **msgspec.structs.asdict(plan),
        fingerprint=exchanged.fingerprint,
        optimizer=exchanged.optimizer,
        accelerated=shape.accelerated,
    )


def check_plan(plan: JobPlan, exchanged: Exchanged) -> None:
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
