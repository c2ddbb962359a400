"""The state of a worker's optimizer on its way to the servers that run it, and back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.protocol import Layout
from paceline.served.client import WorkerSide
from paceline.served.memory import as_row
from paceline.served.updates import EXISTS, Scalars, is_elementwise_state


def push_state(
    optimizer: Optimizer, tensors: Sequence[Tensor], layout: Layout, worker: WorkerSide
) -> None:
    """Give the servers the state that is in the worker's optimizer."""
    for chunk in layout.chunks:
        elements: dict[str, Tensor] = {}
        scalars: Scalars = []
        for index in chunk.parameters:
            tensor, place = tensors[index], layout.places[index]
            state = optimizer.state.get(tensor, {})
            scalars.append({EXISTS: 1.0} if state else {})
            start, stop = max(place.start, chunk.start), min(place.stop, chunk.stop)
            for name, value in state.items():
                if is_elementwise_state(name, value, tensor.numel()):
                    whole = elements.setdefault(
                        name, torch.zeros(chunk.stop - chunk.start, dtype=value.dtype)
                    )
                    row = as_row(value, tensor)[start - place.start : stop - place.start]
                    whole[start - chunk.start : stop - chunk.start] = row
                elif value is not None:
                    scalars[-1][name] = float(value)
        if any(scalars):
            worker.assign_state(chunk.index, elements, scalars)


def pull_state(
    optimizer: Optimizer, tensors: Sequence[Tensor], layout: Layout, worker: WorkerSide
) -> None:
    """Fill the worker's optimizer with the servers' state, in the tensors' shapes."""
    states = worker.fetch_states()
    beside = _beside(optimizer)
    for index, tensor in enumerate(tensors):
        place = layout.places[index]
        merged: dict[str, Any] = {}
        for chunk in (c for c in layout.chunks if index in c.parameters):
            elements, scalars = states[chunk.index]
            numbers = scalars[chunk.parameters.index(index)]
            if EXISTS not in numbers:
                continue
            start, stop = max(place.start, chunk.start), min(place.stop, chunk.stop)
            for name, values in elements.items():
                if name not in merged:
                    merged[name] = torch.zeros_like(tensor, dtype=values.dtype).detach()
                part = values[start - chunk.start : stop - chunk.start]
                as_row(merged[name], tensor)[start - place.start : stop - place.start] = part
            device = tensor.device if id(tensor) in beside else None
            merged |= {n: torch.tensor(v, device=device) for n, v in numbers.items() if n != EXISTS}
        if merged:
            optimizer.state[tensor] = merged


def _beside(optimizer: Optimizer) -> set[int]:
    """Tensors whose single numbers (how many steps they have seen) lie on their device too."""
    groups = (g for g in optimizer.param_groups if g.get("fused") or g.get("capturable"))
    return {id(tensor) for group in groups for tensor in group["params"]}
