"""Workers of one job in one process, as far as `shard` sees a session: for tests of what it hands
over. Whatever trains for real runs in processes (`paceline.testing`)."""

from types import SimpleNamespace
from unittest import mock

from torch.distributed import HashStore

from paceline.errors import SpecError
from paceline.telemetry import StepClock
from paceline.training import sharding


class Worker:
    """One worker. Worker 0 must draw before the others: it never waits, and they find its notes."""

    def __init__(self, rank: int, workers: int, store: HashStore) -> None:
        self.rank, self.workers, self.store = rank, workers, store
        self.members = tuple(range(workers))
        self.has_joined = False
        self.survivors = SimpleNamespace(go_on=False)
        self.clock = StepClock()
        self.is_training: bool | None = True
        self.gradients, self.scale = 0, 1.0
        self.watches = False
        self.refusal: SpecError | None = None
        self.notes: list[str] = []
        self.shards = 0

    def scale_gradients(self, scale: float) -> None:
        self.scale, self.refusal = scale, None

    def refuse_gradients(self, error: SpecError) -> None:
        self.refusal = error
        self.watches = True

    def watch_gradients(self) -> None:
        self.watches = True

    def count_shard(self) -> None:
        self.shards += 1

    def note(self, text: str, kind: str = "note") -> None:
        self.notes.append(text)

    def backward(self) -> float:
        """Gradients come; returns what they are multiplied by."""
        if not self.watches:
            return 1.0
        if self.refusal is not None:
            raise self.refusal
        self.gradients += 1
        return self.scale

    def shard(self, loader, **options):
        with mock.patch.object(sharding, "current", return_value=self):
            return sharding.shard(loader, **options)


def job(workers: int) -> list[Worker]:
    """The workers of a new job."""
    store = HashStore()
    return [Worker(rank, workers, store) for rank in range(workers)]
