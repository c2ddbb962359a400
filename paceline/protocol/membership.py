"""Who is in the job. Every change makes a new *generation*; nobody waits for one who left."""

import msgspec


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one generation."""

    generation: int = 0
    workers: frozenset[int] = frozenset()

    def joined(self, worker: int) -> "Membership":
        if worker in self.workers:
            return self
        return Membership(generation=self.generation + 1, workers=self.workers | {worker})

    def left(self, worker: int) -> "Membership":
        if worker not in self.workers:
            return self
        return Membership(generation=self.generation + 1, workers=self.workers - {worker})


def of_size(workers: int) -> Membership:
    """The first generation: workers 0 to `workers` - 1."""
    return Membership(workers=frozenset(range(workers)))
