"""The server's side: holds the weights of a seat's chunks, and computes what its machine wants.

With `update = "worker"` averaged gradients stand in the place of weights.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from paceline.protocol.actions import Drop, Work
from paceline.protocol.messages import Assign, AssignState, Copy, Handed, Push, State
from paceline.protocol.seat import SeatMachine
from paceline.served.job_plan import JobPlan
from paceline.served.memory import Flats, Piece, as_buffer, from_buffer
from paceline.served.transports import Payloads, Transport
from paceline.served.updates import ChunkOptimizers, mean, only

Filled = TypeVar("Filled", bound=Copy | State)


class ServerSide:
    """One seat: some chunks, their weights, the gradients that have come for them."""

    def __init__(
        self,
        *,
        plan: JobPlan,
        machine: SeatMachine,
        served: Flats,
        transports: Mapping[str, Transport],
    ) -> None:
        """`transports`: the way to each worker."""
        self.machine, self.transports = machine, transports
        self._plan, self._served = plan, served
        self._chunks = plan.chunks_of(machine.seat)
        self._kept: dict[tuple[int, int, int], tuple[list[Piece], float]] = {}
        """Chunk, worker and step -> a gradient, and when it came."""
        self._on_hold: dict[int, Tensor] = {}
        """Chunk -> the mean of a step on hold."""
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._summed_bytes = 0
        self._busy_seconds = self._queueing_seconds = 0.0
        self._optimizers: ChunkOptimizers | None = None
        if plan.optimizer:
            self._optimizers = ChunkOptimizers(plan.optimizer, plan.groups)
            for chunk in self._chunks:
                self._optimize(chunk)

    def _optimize(self, chunk: int) -> None:
        assert self._optimizers is not None
        facts = self._plan.layout.chunks[chunk]
        ranges = [self._range(chunk, index) for index in facts.parameters]
        group = self._plan.layout.flats[facts.flat].group
        self._optimizers.add(chunk, self._served.chunk(chunk), group, ranges)

    # Gradients.

    def keep(self, push: Push, payloads: Payloads, arrived: float) -> None:
        if not push.empty:
            pieces = self.transports[f"worker{push.worker}"].take_gradient(push.chunk, payloads)
            self._kept[push.chunk, push.worker, push.step] = pieces, arrived

    def drop(self, drop: Drop) -> None:
        self._kept.pop((drop.chunk, drop.worker, drop.step), None)  # an empty one never was here

    def work(self, work: Work) -> Sequence[float]:
        """Do what was decided; returns squared norms where it was to measure."""
        began = time.monotonic()
        squared_norms: Sequence[float] = ()
        if work.kind == "measure":
            squared_norms = self._measure(work)
        elif work.parts:  # else nobody had a gradient: as when `grad` is None
            gradient = self._on_hold.pop(work.chunk) if work.kind == "apply" else self._mean(work)
            if work.scale != 1.0:
                gradient.mul_(work.scale)
            if work.kind != "mean":
                self._update(work, gradient)
        self._busy_seconds += time.monotonic() - began
        return squared_norms

    def _update(self, work: Work, gradient: Tensor) -> None:
        assert self._optimizers is not None, "a plan without an optimizer averages only"
        groups = self._plan.groups if work.settings is None else work.settings
        spared = [self._range(work.chunk, index) for index in work.absent]
        self._optimizers.apply(work.chunk, gradient, groups, spared, work.rate_factor)

    def _range(self, chunk: int, parameter: int) -> slice:
        """Where a parameter lies in a chunk."""
        place, facts = self._plan.layout.places[parameter], self._plan.layout.chunks[chunk]
        return slice(
            max(place.start, facts.start) - facts.start, min(place.stop, facts.stop) - facts.start
        )

    def _mean(self, work: Work) -> Tensor:
        """Of the gradients kept for this step, which are forgotten; a mean goes into its place."""
        now, parts = time.monotonic(), []
        last = 0.0
        for worker, step, weight in work.parts:
            pieces, arrived = self._kept.pop((work.chunk, worker, step))
            parts.append((pieces, weight))
            last = max(last, arrived)
        self._queueing_seconds += len(parts) * (now - last)
        into = self._target(work)
        self._summed_bytes += len(parts) * into.numel() * into.element_size()
        if work.kind == "update" and work.scale == 1.0:  # nobody writes to it: no need for a copy
            alone = only(parts, into.numel())
            return mean(parts, into) if alone is None else alone
        return mean(parts, into)

    def _target(self, work: Work) -> Tensor:
        weights = self._served.chunk(work.chunk)
        if work.kind == "mean":
            return weights
        if work.kind == "measure":  # it is kept
            return torch.empty_like(weights)
        scratch = self._scratch.get(weights.dtype)
        if scratch is None or scratch.numel() < weights.numel():
            scratch = self._scratch[weights.dtype] = torch.empty_like(weights)
        return scratch[: weights.numel()]

    def _measure(self, work: Work) -> list[float]:
        """Sum a chunk on hold and keep the sum."""
        parameters = self._plan.layout.chunks[work.chunk].parameters
        if not work.parts:
            return [0.0] * len(parameters)
        gradient = self._on_hold[work.chunk] = self._mean(work)
        parts = [gradient[self._range(work.chunk, index)] for index in parameters]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64).item() for part in parts]
        return [norm * norm for norm in norms]

    # Weights and state from outside.

    def install(self, message: Assign | AssignState, payloads: Payloads) -> None:
        if isinstance(message, AssignState):
            self._set_state(message, payloads)
        else:
            self._set_weights(message.chunk, payloads[0])

    def _set_weights(self, chunk: int, payload: memoryview | None) -> None:
        assert payload is not None
        weights = self._served.chunk(chunk)
        weights.copy_(from_buffer(payload, weights.dtype))

    def _set_state(self, message: AssignState | Handed, payloads: Payloads) -> None:
        assert self._optimizers is not None
        dtype = self._served.chunk(message.chunk).dtype
        values = [from_buffer(payload, dtype) for payload in payloads if payload is not None]
        tensors = dict(zip(message.names, values, strict=True))
        self._optimizers.set_state(message.chunk, tensors, message.scalars)

    def fill(self, message: Filled) -> tuple[Filled, list[memoryview]]:
        """A message with the state of its chunk: for a worker, or for its second home."""
        assert self._optimizers is not None
        tensors, scalars = self._optimizers.state(message.chunk)
        payloads = [as_buffer(values) for values in tensors.values()]
        filled = msgspec.structs.replace(message, names=list(tensors), scalars=scalars)
        return filled, payloads

    # Chunks of servers that were lost.

    def lacks(self, chunk: int) -> bool:
        return chunk not in self._chunks

    def adopt(self, handed: Handed, payloads: Payloads) -> None:
        """Serve a chunk from here on, as a worker has it."""
        if not self.lacks(handed.chunk):
            return
        weights, *state = payloads
        self._set_weights(handed.chunk, weights)
        self._chunks.append(handed.chunk)
        if self._optimizers is not None:
            self._optimize(handed.chunk)
            if not handed.bare:
                self._set_state(handed, state)

    def counters(self) -> dict[str, object]:
        """What this seat saw, for the record."""
        staleness = {
            f"worker{worker}": dict(sorted(counts.items()))
            for worker, counts in sorted(self.machine.staleness.items())
        }
        chunks = self._plan.layout.chunks
        served_bytes = sum(chunks[chunk].size_bytes for chunk in self._chunks)
        return {
            "served_bytes": served_bytes,
            "served_fraction": served_bytes / max(self._plan.layout.size_bytes, 1),
            "summed_bytes": self._summed_bytes,
            "staleness": staleness,
            "late_gradients": _named(self.machine.late),
            "busy_seconds": self._busy_seconds,
            "queueing_seconds": self._queueing_seconds,
        }


def _named(counts: Counter[int]) -> dict[str, int]:
    return {f"worker{worker}": count for worker, count in sorted(counts.items())}
