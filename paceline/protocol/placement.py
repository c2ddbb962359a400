"""Which server holds which chunk, what share each carries, and the time no exchange can beat.

A *seat* is a place where chunks are served: a server of its own, or one inside a worker.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from paceline.protocol.chunks import Chunk, Layout, ParameterSize, cut

Placement = Literal["dedicated", "colocated", "optimal"]

FEWEST_CHUNKS = 4
"""For each seat, so that it sums one chunk while others are on their way."""

EVEN = 1.05
"""A seat may carry so many times its share."""


def worker_of(member: str) -> int | None:
    """Its rank; None for a server."""
    return int(member.removeprefix("worker")) if member.startswith("worker") else None


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """One place that serves chunks."""

    member: str
    """The member in whose process it runs: "server0", or "worker2" when colocated."""

    share: float
    """The part of all bytes it carries; the shares of all seats sum to one."""

    @property
    def worker(self) -> int | None:
        """The worker in whose process it is; None for a server of its own."""
        return worker_of(self.member)


def seats(placement: Placement, workers: int, servers: int) -> tuple[Seat, ...]:
    """Return who serves; workers' seats first. Seats without a share are left out."""
    worker_share, server_share = shares(placement, workers, servers)
    inside = [Seat(member=f"worker{i}", share=worker_share) for i in range(workers)]
    apart = [Seat(member=f"server{i}", share=server_share) for i in range(servers)]
    return tuple(seat for seat in (*inside, *apart) if seat.share > 0)


def shares(placement: Placement, workers: int, servers: int) -> tuple[float, float]:
    """Return the share of each worker's seat and of each dedicated server.

    `optimal` makes a worker's link, 1 + (n-2)x, and a server's, n·y, finish together.
    """
    n, k = workers, servers
    if placement == "colocated" or (placement == "optimal" and k == 0):
        return 1 / n, 0.0
    if placement == "dedicated" or k >= n:
        return 0.0, 1 / k
    inside = (n - k) / (n * n + k * n - 2 * k)
    return inside, (1 - n * inside) / k


def cut_and_deal(
    parameters: Sequence[ParameterSize],
    shares: Sequence[float],
    preferred_bytes: int,
    least_bytes: int,
) -> tuple[Layout, tuple[int, ...]]:
    """Return chunks as large as preferred, or as even shares allow, and the seat of each.

    Below `least_bytes` the work per chunk costs more than an uneven share does.
    """
    total_bytes = sum(parameter.size_bytes for parameter in parameters)
    chunk_bytes = min(preferred_bytes, total_bytes // (FEWEST_CHUNKS * len(shares)))
    while True:
        chunk_bytes = max(chunk_bytes, least_bytes)
        layout = cut(parameters, chunk_bytes)
        owners = deal(layout.chunks, shares)
        loads = loads_bytes(layout.chunks, owners, len(shares))
        fullest = max(load / share for load, share in zip(loads, shares, strict=True))
        if chunk_bytes == least_bytes or fullest <= EVEN * total_bytes:
            return layout, owners
        chunk_bytes //= 2


def deal(chunks: Sequence[Chunk], shares: Sequence[float]) -> tuple[int, ...]:
    """Return the seat of every chunk, so that each seat carries its share of the bytes.

    Chunks are dealt in forward order to the seat furthest below its share: each layer is spread
    over all seats, and no seat ends more than one chunk above its share.
    """
    loads = [0.0] * len(shares)
    open_seats = [seat for seat, share in enumerate(shares) if share > 0]
    owners = []
    for chunk in chunks:
        seat = min(open_seats, key=lambda s: ((loads[s] + chunk.size_bytes) / shares[s], s))
        loads[seat] += chunk.size_bytes
        owners.append(seat)
    return tuple(owners)


def loads_bytes(chunks: Sequence[Chunk], owners: Sequence[int], seats: int) -> list[int]:
    """Return the bytes each seat carries."""
    loads = [0] * seats
    for chunk, owner in zip(chunks, owners, strict=True):
        loads[owner] += chunk.size_bytes
    return loads


def ring_seconds(workers: int, size_bytes: float, bytes_per_second: float) -> float:
    """Least time of a ring all-reduce, and of `colocated`: every link carries 2(n-1)/n of it."""
    return 2 * (workers - 1) * size_bytes / (workers * bytes_per_second)


def dedicated_seconds(
    workers: int, servers: int, size_bytes: float, bytes_per_second: float
) -> float:
    """Least time with servers of their own: a worker's link or a server's, the fuller one."""
    worker_link = size_bytes / bytes_per_second
    server_link = workers * size_bytes / (servers * bytes_per_second)
    return max(worker_link, server_link)


def optimal_seconds(
    workers: int, servers: int, size_bytes: float, bytes_per_second: float
) -> float:
    """Least time when spare servers and workers share so that every link finishes together."""
    n, k = workers, servers
    if k >= n:
        return dedicated_seconds(n, k, size_bytes, bytes_per_second)
    return 2 * n * (n - 1) * size_bytes / ((n * n + k * n - 2 * k) * bytes_per_second)


def exchange_seconds(
    placement: Placement, workers: int, servers: int, size_bytes: float, bytes_per_second: float
) -> float:
    """Least seconds to exchange `size_bytes` once, every link at `bytes_per_second` each way."""
    if workers == 1 and placement != "dedicated":
        return 0.0
    if placement == "colocated":
        return ring_seconds(workers, size_bytes, bytes_per_second)
    if placement == "dedicated":
        return dedicated_seconds(workers, servers, size_bytes, bytes_per_second)
    return optimal_seconds(workers, servers, size_bytes, bytes_per_second)
