"""What ideal links allow: the protocol's own machines, and links that connections divide evenly.

    python benchmarks/ideal_links.py --json

The limit in `tunnel.py` takes every link as full at all times. Two things keep it from that on any
hardware: a layer waits for its own weights, and connections that share a link get equal parts of
it, however much each still has to carry. Here both hold and nothing else costs anything: no CPU,
no latency. What a run in the tunnel takes beyond this is ours or this machine's.
"""

import argparse
import heapq
import json
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import tunnel
from tunnel import COMPUTE_SECONDS, PAYLOAD_BYTES_PER_SECOND, WORKERS, profile_of

from paceline import protocol, spec
from paceline.protocol import Answer, Departed, ParameterSize, Push, Ready, Send, Usable
from paceline.protocol.placement import TRAVELLING_CHUNK_BYTES, Placement, exchange_seconds
from paceline.spec.profile import Layer

ROWS: dict[str, tuple[Placement, int]] = {
    name: (architecture.placement, servers)
    for name, (text, servers) in tunnel.ROWS.items()
    if isinstance(architecture := spec.parse_architecture(text), spec.Server)
}
"""Those of `tunnel.py` that have servers."""

STEPS, WARMUP_STEPS = 8, 3
Connection = tuple[str, str, str]
"""From, to, and what it carries: pushes and answers between two members have one each."""

Then = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compute", type=float, nargs="+", default=COMPUTE_SECONDS)
    parser.add_argument("--window", type=int, default=spec.Server().window)
    parser.add_argument(
        "--jitter", type=float, default=0.0, metavar="SECONDS", help="at most, in a layer of twenty"
    )
    given = parser.parse_args()
    rows = [
        row(name, compute, given.window, given.jitter) for name in ROWS for compute in given.compute
    ]
    if given.json:
        print(json.dumps({"rows": rows, "checks": []}, indent=1))
        return
    for found in rows:
        name, compute, seconds = found["name"], found["compute_seconds"], found["seconds"]
        ratio = seconds / found["limit_seconds"]
        print(f"{name:10} compute {compute:4.2f} s  step {seconds:6.3f} s  x{ratio:5.2f} its limit")


def row(name: str, compute: float, window: int, jitter: float) -> dict[str, Any]:
    placement, servers = ROWS[name]
    job = Job(placement, servers, profile_of(compute).layers, window, jitter)
    exchange = exchange_seconds(
        placement, WORKERS, servers, job.layout.size_bytes, PAYLOAD_BYTES_PER_SECOND
    )
    return {
        "name": name,
        "compute_seconds": compute,
        "seconds": job.run(),
        "limit_seconds": max(compute, exchange),
    }


class Links:
    """Every member's cable, each direction at the same rate."""

    def __init__(self) -> None:
        self._queues: dict[Connection, deque[tuple[float, Then]]] = {}

    def send(self, connection: Connection, size_bytes: int, then: Then) -> None:
        self._queues.setdefault(connection, deque()).append((size_bytes, then))

    def next_arrival(self) -> tuple[float, dict[Connection, float]]:
        """Seconds until something has wholly arrived, and the rates until then."""
        rates = self._rates()
        return min((self._queues[c][0][0] / rate for c, rate in rates.items()), default=1e9), rates

    def move(self, seconds: float, rates: dict[Connection, float]) -> list[Then]:
        """Let time pass; returns what is to be done for all that has arrived."""
        arrived = []
        for connection, rate in rates.items():
            queue = self._queues[connection]
            left, then = queue[0]
            left -= rate * seconds
            if left > 1.0:
                queue[0] = left, then
            else:
                queue.popleft()
                arrived.append(then)
        return arrived

    def _rates(self) -> dict[Connection, float]:
        """Fill the fullest cable evenly, then the next with what is left, until all have a rate."""
        users: dict[tuple[str, str], set[Connection]] = {}
        for connection in (c for c, queue in self._queues.items() if queue):
            users.setdefault((connection[0], "out"), set()).add(connection)
            users.setdefault((connection[1], "in"), set()).add(connection)
        free = dict.fromkeys(users, PAYLOAD_BYTES_PER_SECOND)
        rates: dict[Connection, float] = {}
        while users:
            fullest = min(users, key=lambda cable: free[cable] / len(users[cable]))
            share = free[fullest] / len(users[fullest])
            for connection in users[fullest]:
                rates[connection] = share
                for cable in ((connection[0], "out"), (connection[1], "in")):
                    free[cable] = max(0.0, free[cable] - share)
                    if cable != fullest:
                        users[cable].discard(connection)
            del users[fullest]
            users = {cable: found for cable, found in users.items() if found}
        return rates


class Job:
    """Workers with a device each, the seats, and a virtual clock."""

    def __init__(
        self,
        placement: Placement,
        servers: int,
        layers: Sequence[Layer],
        window: int,
        jitter: float,
    ) -> None:
        sizes = [ParameterSize(name=x.name, elements=x.parameter_bytes // 4) for x in layers]
        seats = protocol.seats(placement, WORKERS, servers)
        shares = [seat.share for seat in seats]
        self.layout, owners = protocol.cut_and_deal(sizes, shares, *TRAVELLING_CHUNK_BYTES)
        self._seats = [seat.member for seat in seats]
        self._layers, self._links = layers, Links()
        self._jitter, self._random = jitter, random.Random(0)
        self._chunks_of = [
            {c.index for c in self.layout.chunks if index in c.parameters}
            for index in range(len(layers))
        ]
        self._workers = [
            protocol.WorkerMachine(
                rank,
                self.layout.chunks,
                owners,
                window=window,
                own_seat=rank if f"worker{rank}" in self._seats else None,
            )
            for rank in range(WORKERS)
        ]
        self._servers = [
            protocol.ServerMachine(
                [chunk for chunk, owner in enumerate(owners) if owner == seat],
                protocol.of_size(WORKERS),
            )
            for seat in range(len(seats))
        ]
        self._now, self._count = 0.0, 0
        self._due: list[tuple[float, int, Then]] = []
        self._needed: list[set[int]] = [set() for _ in range(WORKERS)]
        self._ends: list[float] = []
        self._devices = [self._device(rank) for rank in range(WORKERS)]

    def run(self) -> float:
        """Seconds of a step, the median after warm-up."""
        for rank in range(WORKERS):
            self._go_on(rank)
        while len(self._ends) < STEPS * WORKERS:
            seconds, rates = self._links.next_arrival()
            due = self._due[0][0] if self._due else self._now + seconds
            seconds = min(seconds, due - self._now)
            arrived = self._links.move(seconds, rates)
            self._now += seconds
            for then in arrived:
                then()
            while self._due and self._due[0][0] <= self._now:
                heapq.heappop(self._due)[2]()
        ends = self._ends[WORKERS - 1 :: WORKERS][WARMUP_STEPS - 1 :]
        return statistics.median(b - a for a, b in pairwise(ends))

    def _device(self, rank: int) -> Iterator[float | set[int]]:
        """Yields the seconds it computes, or the chunks whose weights it needs."""
        for _ in range(STEPS):
            for layer, chunks in zip(self._layers, self._chunks_of, strict=True):
                yield chunks
                yield layer.forward_seconds
            unmade = [len(chunk.parameters) for chunk in self.layout.chunks]
            for index in reversed(range(len(self._layers))):
                yield self._layers[index].backward_seconds
                for chunk in sorted(self._chunks_of[index]):
                    unmade[chunk] -= 1
                    if unmade[chunk] == 0:
                        self._act(rank, self._workers[rank].handle(Ready(chunk)))
            self._ends.append(self._now)

    def _go_on(self, rank: int) -> None:
        for wanted in self._devices[rank]:
            if isinstance(wanted, float):
                self._count += 1
                late = self._random.uniform(0, self._jitter) * (self._random.random() < 0.05)
                entry = self._now + wanted + late, self._count, lambda: self._go_on(rank)
                heapq.heappush(self._due, entry)
                return
            self._needed[rank] = wanted & self._workers[rank].outstanding
            if self._needed[rank]:
                return

    def _act(self, rank: int, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case Send(seat, Push() as push):
                    self._carry(
                        (f"worker{rank}", self._seats[seat], "push"),
                        push.chunk,
                        lambda seat=seat, push=push: self._serve(rank, seat, push),
                    )
                case Usable() if self._needed[rank]:
                    self._needed[rank].discard(action.chunk)
                    if not self._needed[rank]:
                        self._go_on(rank)

    def _serve(self, rank: int, seat: int, push: Push) -> None:
        if self._seats[seat] != f"worker{rank}":
            self._act(rank, self._workers[rank].handle(Departed(push.chunk)))
        for action in self._servers[seat].handle(push):
            match action:
                case Answer():
                    self._carry(
                        (self._seats[seat], f"worker{action.worker}", "answer"),
                        action.chunk,
                        lambda answer=action: self._act(
                            answer.worker, self._workers[answer.worker].handle(answer)
                        ),
                    )

    def _carry(self, connection: Connection, chunk: int, then: Then) -> None:
        if connection[0] == connection[1]:
            then()
        else:
            self._links.send(connection, self.layout.chunks[chunk].size_bytes, then)


if __name__ == "__main__":
    main()
