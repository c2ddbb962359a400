"""A seat on a GPU: its chunks, their sums and the optimizer's state live on the device.

Gradients come, and weights go, through main memory as ever: the transports and the machine know
nothing of it. Where all members share the device's memory (`device_memory.py`) they stay there. A
gradient is on its way to the device when it has come, and an update is told of
when its weights are back. All of it runs on a stream of the seat's own, beside a worker that trains
on the same GPU.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from paceline import spec
from paceline.collectives.context import Context
from paceline.errors import SpecError
from paceline.protocol.actions import Work
from paceline.protocol.messages import AssignState, Handed, Push
from paceline.protocol.seat import SeatMachine
from paceline.served.device import Pinned
from paceline.served.job_plan import JobPlan
from paceline.served.memory import Flats
from paceline.served.server import Chunks, Filled, ServerSide
from paceline.served.transports import Payloads, Transport


def seat_device(options: spec.Server, context: Context) -> torch.device | None:
    """Where this member serves; None for main memory. A worker serves on the GPU it trains on."""
    if options.device == "cpu":
        return None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        problem = f"device = cuda, and {context.identity.name} finds no GPU that torch can use."
        raise SpecError("architecture server", problem, "leave device out: servers need no GPU.")
    if context.device.type == "cuda":
        return context.device
    return torch.device("cuda", context.identity.local_index % gpus)


class _Own:
    """The chunks of one seat, on its device: nothing is taken there for those of others."""

    def __init__(self, chunks: Sequence[int], like: Flats, device: torch.device) -> None:
        self._chunks = {chunk: like.chunk(chunk).to(device, copy=True) for chunk in chunks}

    def chunk(self, index: int) -> Tensor:
        return self._chunks[index]


class DeviceServerSide(ServerSide):
    """A seat whose memory is a device's."""

    def __init__(
        self,
        device: torch.device,
        *,
        plan: JobPlan,
        machine: SeatMachine,
        published: Flats,
        transports: Mapping[str, Transport],
        pinned: Pinned | None,
    ) -> None:
        """`published`: where transports find weights, in main memory; or what is served itself, in
        memory of the device that all members share."""
        self._device, self._published, self._pinned = device, published, pinned
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with self._beside():
            own: Chunks = published
            if not plan.on_device:
                own = _Own(plan.chunks_of(machine.seat), published, device)
            super().__init__(plan=plan, machine=machine, served=own, transports=transports)
            self._settle()

    def keep(self, push: Push, payloads: Payloads, arrived: float) -> None:
        super().keep(push, payloads, arrived)
        key = push.chunk, push.worker, push.step
        if key not in self._kept:
            return
        pieces, arrived = self._kept[key]
        with self._beside():
            moved = [(a, b, v.to(self._device, non_blocking=True)) for a, b, v in pieces]
        self._kept[key] = moved, arrived

    def work(self, work: Work) -> Sequence[float]:
        with self._beside():
            squared_norms = super().work(work)
            if work.parts and work.kind != "measure":
                began = time.monotonic()
                self._publish(work.chunk)
                self._busy_seconds += time.monotonic() - began
        return squared_norms

    def _set_weights(self, chunk: int, payload: memoryview | None) -> None:
        with self._beside():
            super()._set_weights(chunk, payload)
            self._publish(chunk)

    def _set_state(self, message: AssignState | Handed, payloads: Payloads) -> None:
        with self._beside():
            super()._set_state(message, payloads)
            self._settle()

    def fill(self, message: Filled) -> tuple[Filled, list[memoryview]]:
        with self._beside():
            return super().fill(message)

    def close(self) -> None:
        self._settle()
        if self._pinned is not None:
            self._pinned.close()

    def _publish(self, chunk: int) -> None:
        """Whoever is told of an update reads what is published at once: it must be there."""
        if self._served is not self._published:
            self._published.chunk(chunk).copy_(self._served.chunk(chunk), non_blocking=True)
        self._settle()

    def _settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
