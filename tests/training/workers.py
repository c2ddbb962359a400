"""Workers of one job in one process, as far as `shard` sees a session: for tests of what it hands
over. Whatever trains for real runs in processes (`paceline.testing`)."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch.distributed import HashStore

from paceline.autograd.scaling import ScaledGradients
from paceline.session.loader import sharding
from paceline.session.loader.positions import Positions
from paceline.telemetry import StepClock


class Worker:
    """One worker. Worker 0 must draw before the others: it never waits, and they find its notes."""

    def __init__(self, rank: int, workers: int, store: HashStore) -> None:
        self.rank, self.workers, self.store = rank, workers, store
        self.members = tuple(range(workers))
        self.has_joined = self.has_successors = False
        self.survivors = SimpleNamespace(go_on=False)
        self.clock = StepClock()
        self.is_training: bool | None = True
        self._weight = torch.zeros(1, requires_grad=True)
        trained = SimpleNamespace(everything=lambda: [self._weight])
        self.gradients = ScaledGradients([trained], lambda error: None)
        self.notes: list[str] = []
        self.shards = 0
        self.shares_batches = False
        self.closed: list[str] = []
        """Why nobody can join, as it was said."""
        self.samples = 0
        """In all batches that were handed out."""
        self.identity = SimpleNamespace(servers=0)
        self.positions = Positions(self)

    def hand_samples(self, count: int) -> None:
        self.samples += count

    @property
    def sharing(self) -> tuple[int, ...]:
        return self.members

    @property
    def is_closed_to_newcomers(self) -> bool:
        return bool(self.closed)

    @property
    def leader(self) -> int:
        return self.members[0]

    def count_shard(self) -> None:
        self.shards += 1

    def close_to_newcomers(self, why: str) -> None:
        self.closed.append(why)

    def note(self, text: str, kind: str = "note") -> None:
        self.notes.append(text)

    def backward(self) -> float:
        """Gradients come; returns what they are multiplied by."""
        self._weight.grad = None
        self._weight.sum().backward()
        return float(self._weight.grad)

    def shard(self, loader, **options):
        with mock.patch.object(sharding, "current", return_value=self):
            return sharding.shard(loader, **options)


def job(workers: int) -> list[Worker]:
    """The workers of a new job."""
    store = HashStore()
    return [Worker(rank, workers, store) for rank in range(workers)]
