"""Workers of one job in one process, as far as `shard` sees a session: for tests of what it hands
over. Whatever trains for real runs in processes (`paceline.testing`)."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

from paceline.autograd.scaling import ScaledGradients
from paceline.launch import Identity
from paceline.session.join_obstacle import KEY, JoinObstacle
from paceline.session.loader import sharding
from paceline.session.loader.ledger import Ledger
from paceline.session.loader.positions import Positions
from paceline.session.observers.passes import SampleCount
from paceline.session.participants import Participants
from paceline.session.script_group import ScriptGroup
from paceline.session.shared_values import SharedValues
from paceline.telemetry import StepClock


class Worker:
    """One worker. Worker 0 must draw before the others: it never waits, and they find its notes."""

    def __init__(self, rank: int, workers: int, store: HashStore | None) -> None:
        self.rank, self.workers, self.store = rank, workers, store
        self.participants = participants = Participants(Identity(index=rank, workers=workers))
        self.join_obstacle = JoinObstacle()
        self.steps = SimpleNamespace(clock=StepClock(), samples=SampleCount())
        self._weight = torch.zeros(1, requires_grad=True)
        trained = SimpleNamespace(everything=lambda: [self._weight])
        self.gradients = ScaledGradients([trained], lambda error: None)
        self.distribution = SimpleNamespace(gradients=self.gradients, is_training=True)
        self.ledger = Ledger(self.distribution, self.join_obstacle)
        group = ScriptGroup(participants, self.join_obstacle, pytest.fail, regroups=lambda: False)
        self.values = SharedValues(participants, store, group)
        self.positions = Positions(participants, self.join_obstacle, store, exclusive=True)
        self.notes: list[str] = []

    @property
    def obstacle(self) -> str:
        """The reason that workers who ask to join are told."""
        identity = Identity(workers=self.workers, servers=1)
        self.join_obstacle.publish(identity, self.store)
        return self.store.get(KEY).decode()

    @property
    def samples(self) -> int:
        """In all batches that were handed out."""
        return self.steps.samples._handed

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
