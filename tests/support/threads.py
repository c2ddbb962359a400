"""Workers as threads of one process: architectures tested without a network, in milliseconds."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from paceline.collectives.context import Context
from paceline.launch import Identity
from paceline.telemetry import StepClock

DEADLINE_SECONDS = 30.0


class MemoryGroup:
    """What the threads share: a place for each one's tensor, and a barrier."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.barrier = threading.Barrier(workers, timeout=DEADLINE_SECONDS)
        self.offered: list[torch.Tensor | None] = [None] * workers
        self.num_summed_elements = 0


class MemoryCollective:
    """A `Collective` over a `MemoryGroup`."""

    counts_equally = True

    def __init__(self, group: MemoryGroup, rank: int) -> None:
        self.members, self.summed = tuple(range(group.workers)), group.workers
        self.weight = float(group.workers)
        self._group, self._rank = group, rank
        self._started: list[torch.Tensor] = []

    def broadcast(self, flat: torch.Tensor) -> None:
        flat.copy_(self._everyones(flat)[0])

    def start(self, flat: torch.Tensor) -> None:
        self._started.append(flat)

    def finish(self) -> None:
        started, self._started = self._started, []
        for flat in started:
            if self._rank == 0:
                self._group.num_summed_elements += flat.numel()
            flat.copy_(torch.stack(self._everyones(flat)).sum(dim=0))

    def close(self) -> None:
        pass

    def _everyones(self, flat: torch.Tensor) -> list[torch.Tensor]:
        self._group.offered[self._rank] = flat.clone()
        self._group.barrier.wait()
        everyones = [tensor for tensor in self._group.offered if tensor is not None]
        self._group.barrier.wait()
        return everyones


def context(rank: int, workers: int) -> Context:
    return Context(
        identity=Identity(index=rank, workers=workers),
        store=None,
        clock=StepClock(),
        device=torch.device("cpu"),
        note=lambda text: None,
    )


def run_threads(function: Callable[..., Any], workers: int, *arguments: object) -> list[Any]:
    """Call `function(collective, context, *arguments)` on every thread; what each returned."""
    group = MemoryGroup(workers)

    def be_worker(rank: int) -> Any:
        try:
            return function(MemoryCollective(group, rank), context(rank, workers), *arguments)
        except BaseException:
            group.barrier.abort()  # nobody waits for this one
            raise

    with ThreadPoolExecutor(workers) as threads:
        futures = [threads.submit(be_worker, rank) for rank in range(workers)]
    errors = [error for future in futures if (error := future.exception())]
    if errors:  # the others only lost somebody to wait for
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in futures]
