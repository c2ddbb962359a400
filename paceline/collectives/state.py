"""The state of a training step, from one participant to the workers that join at that step.

Weights and buffers go into the tensors of the model that the joining worker has built. The rest
(the optimizers' state, what an architecture keeps from step to step) travels as nested values:
their structure as JSON, their tensors one by one. Nothing is unpickled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.collectives.group import Group
from paceline.errors import ExchangeError, SpecError
from paceline.protocol.views import View

TENSOR, PAIRS, LIST, REFUSED = "tensor", "pairs", "list", "refused"
"""How tensors and containers are written in JSON, where dictionaries have other keys than text."""


def give(group: Group, view: View, tensors: Sequence[Tensor], values: Any) -> None:
    """Called by the source of a view: send the state to each worker that joins."""
    packed = _Packed()
    try:
        written = packed.write(values)
    except ExchangeError as error:  # it concerns the worker that joins, and nobody else
        packed, written = _Packed(), [REFUSED, str(error)]
    head = msgspec.json.encode(written)
    content = [torch.frombuffer(bytearray(head), dtype=torch.uint8), *packed.tensors, *tensors]
    for worker in view.joined:
        place = group.members.index(worker)
        _send(group, torch.tensor([len(head)]), place)
        for tensor in content:
            _send(group, tensor, place)


def take(group: Group, view: View, tensors: Sequence[Tensor]) -> Any:
    """Called by a worker that joins: fill these tensors; returns the other values."""
    place = group.members.index(view.source)
    size = torch.zeros(1, dtype=torch.int64)
    _receive(group, size, place)
    head = torch.zeros(int(size), dtype=torch.uint8)
    _receive(group, head, place)
    packed = _Packed()
    match written := msgspec.json.decode(head.numpy().tobytes()):
        case [str(kind), str(problem)] if kind == REFUSED:
            raise SpecError("--join", problem, "start the job with all its workers.")
    values = packed.read(written)
    for tensor in packed.tensors:
        _receive(group, tensor, place)
    with torch.no_grad():
        for tensor in tensors:
            came = torch.empty(tensor.shape, dtype=tensor.dtype)
            _receive(group, came, place)
            tensor.copy_(came)
    return values


def _send(group: Group, tensor: Tensor, place: int) -> None:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel():
        group.send(flat.view(torch.uint8), place, 0).wait()


def _receive(group: Group, tensor: Tensor, place: int) -> None:
    """Fill a new, contiguous tensor."""
    if tensor.numel():
        group.receive(tensor.view(-1).view(torch.uint8), place, 0).wait()


@dataclass(slots=True)
class _Packed:
    """Nested values with their tensors taken out, or put in again."""

    tensors: list[Tensor] = field(default_factory=list)

    def write(self, value: Any) -> Any:
        match value:
            case Tensor():
                self.tensors.append(value)
                name = str(value.dtype).removeprefix("torch.")
                return [TENSOR, name, list(value.shape)]
            case dict():
                return [PAIRS, [[self.write(k), self.write(v)] for k, v in value.items()]]
            case list() | tuple():
                return [LIST, [self.write(one) for one in value]]
            case None | bool() | int() | float() | str():
                return value
        raise ExchangeError(f"the optimizer's state holds a {type(value).__name__}.")

    def read(self, value: Any) -> Any:
        match value:
            case [str(kind), str(name), list(shape)] if kind == TENSOR:
                self.tensors.append(torch.empty(shape, dtype=getattr(torch, name)))
                return self.tensors[-1]
            case [str(kind), list(pairs)] if kind == PAIRS:
                return {self.read(k): self.read(v) for k, v in pairs}
            case [str(kind), list(values)] if kind == LIST:
                return [self.read(one) for one in values]
        return value
