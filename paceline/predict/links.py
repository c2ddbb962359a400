"""Links that connections share max-min fairly, on a virtual clock.

    links = Links(clock)
    links.add("worker0 out", 125e6, latency_seconds=50e-6)
    links.add("server0 in", 125e6)
    links.send(("worker0", "server0"), ("worker0 out", "server0 in"), 262144, arrived)

A *connection* carries its messages one after the other, as TCP does. Connections that are sending
divide every link they cross by what each has in its queue, up to a window: a queue in front of a
link serves whoever stands in it. So with much to send they divide it evenly, and what one cannot
use because it is held up elsewhere goes to the others. A message has *departed* when its last byte
has left, and *arrives* after the latencies of its links. Knows nothing of what is carried.

A connection may stand for many alike: `("server0 in", 64.0)` in a path says that for each byte of
this message 64 cross that link, and the connection counts as 64 of its users.

All connections are rows of a few arrays: with a hundred of them a loop over objects would take most
of a prediction's time.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.predict.clock import Alarm, Clock, Then

Numbers = NDArray[np.float64]
NOTHING_BYTES = 1e-6
"""Less than this of a message is left over by rounding."""

ROUNDING_BYTES = 1e-3
"""Sums of all that a connection has sent are off by no more."""

WINDOW_BYTES = 1 << 19
"""What a connection has on its way at most. One with more to send stands in a link's queue with all
of it, one with half of it or less with half: finer steps cost time and change nothing."""

NOBODY = np.zeros(1, dtype=bool)


class VirtualLink:
    """One direction of a cable."""

    def __init__(
        self, name: str, number: int, bytes_per_second: float, latency_seconds: float
    ) -> None:
        self.name, self.number, self.bytes_per_second = name, number, bytes_per_second
        self.latency_seconds = latency_seconds
        self.carried_bytes = 0.0


class _Message:
    __slots__ = ("arrived", "began", "size_bytes")

    def __init__(self, size_bytes: float, arrived: Then) -> None:
        self.size_bytes, self.arrived = size_bytes, arrived
        self.began = 0.0
        """When its first byte left."""


class _Connection:
    """Messages on one way; the first is under way."""

    def __init__(self, name: Hashable, row: int, links: dict[VirtualLink, float]) -> None:
        self.name, self.row, self.links = name, row, links
        """Links with how many alike this connection stands for on each."""
        self.latency_seconds = sum(link.latency_seconds for link in links)
        self.queue: deque[_Message] = deque()
        self.queued_bytes = self.sent_bytes = 0.0
        self.departing: deque[tuple[float, Then]] = deque()
        """Where in all that is sent a message ends, and who is to be told when it has departed."""

    @property
    def claim(self) -> float:
        """On the links it crosses, beside others."""
        return 1.0 if self.queued_bytes > WINDOW_BYTES / 2 else 0.5


class Links:
    """All links of a cluster and what is under way on them."""

    def __init__(self, clock: Clock, held_bytes: float = 0.0) -> None:
        """`held_bytes`: so much of a connection's queue has departed for whoever sent it, though it
        has not left: the kernel has it."""
        self._clock, self._held_bytes = clock, held_bytes
        self._links: dict[str, VirtualLink] = {}
        self._connections: dict[Hashable, _Connection] = {}
        self._rows: list[_Connection] = []
        self._weights: Numbers = np.zeros((0, 0))
        self._most: Numbers = np.zeros(0)
        self._left: Numbers = np.zeros(0)
        self._rate: Numbers = np.zeros(0)
        self._claim: Numbers = np.zeros(0)
        """Of those that are sending; the others have none."""
        self._since = 0.0
        """When `_left` was true."""
        self._shared: dict[bytes, Numbers] = {}
        """Claims -> everybody's rate: the same ones send at the same time again and again."""
        self._unfair = False
        """Somebody has begun or stopped to send since the rates were computed."""
        self._alarm: Alarm | None = None
        self.on_carried: Callable[[Hashable, float, float, float], None] | None = None
        """(connection, bytes, since when, seconds), when a message has departed."""

    def add(self, name: str, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        """Lay a link; its name is used in paths."""
        self._links[name] = VirtualLink(name, len(self._links), bytes_per_second, latency_seconds)

    def link(self, name: str) -> VirtualLink:
        return self._links[name]

    def all(self) -> dict[str, VirtualLink]:
        """Every link by name."""
        return dict(self._links)

    def send(
        self,
        connection: Hashable,
        path: Sequence[str | tuple[str, float]],
        size_bytes: float,
        arrived: Then,
        departed: Then | None = None,
        most_bytes_per_second: float = math.inf,
    ) -> None:
        """Put a message behind those of its connection; the two calls happen later, never inside.

        The first message of a connection lays down its path and the rate it cannot exceed (a TCP
        window over the round trip, a slow sender).
        """
        way = self._connections.get(connection)
        if way is None:
            way = self._connections[connection] = self._connect(
                connection, path, most_bytes_per_second
            )
        way.queue.append(_Message(size_bytes, arrived))
        way.queued_bytes += size_bytes
        if departed is not None:
            way.departing.append((way.sent_bytes + way.queued_bytes, departed))
            if self._held_bytes:
                self._tell_departed(way)
        if len(way.queue) == 1:
            way.queue[0].began = self._clock.now
            self._advance()
            self._left[way.row], self._rate[way.row] = size_bytes, 0.0
        self._set_claim(way, way.claim)

    def _set_claim(self, way: _Connection, claim: float) -> None:
        if self._claim[way.row] != claim:
            self._claim[way.row] = claim
            self._reconsider()

    def _connect(
        self, name: Hashable, path: Sequence[str | tuple[str, float]], most: float
    ) -> _Connection:
        parts = [(part, 1.0) if isinstance(part, str) else part for part in path]
        row = len(self._rows)
        self._shared.clear()
        way = _Connection(name, row, {self._links[link]: weight for link, weight in parts})
        self._rows.append(way)
        if row >= len(self._left) or self._weights.shape[1] < len(self._links):
            self._grow(max(8, 2 * len(self._left), row + 1))
        for link, weight in way.links.items():
            self._weights[row, link.number] = weight
        self._most[row] = most
        return way

    def _grow(self, rows: int) -> None:
        weights = np.zeros((rows, len(self._links)))
        weights[: self._weights.shape[0], : self._weights.shape[1]] = self._weights
        self._weights = weights
        more = rows - len(self._left)
        self._most = np.append(self._most, np.full(more, math.inf))
        self._left = np.append(self._left, np.zeros(more))
        self._rate = np.append(self._rate, np.zeros(more))
        self._claim = np.append(self._claim, np.zeros(more))

    def _advance(self) -> None:
        """Let what was under way until now arrive."""
        if self._clock.now > self._since:
            self._left -= self._rate * (self._clock.now - self._since)
        self._since = self._clock.now

    def _reconsider(self) -> None:
        """Divide the links anew, once for all that begins or stops at this moment."""
        if not self._unfair:
            self._unfair = True
            self._clock.after(0.0, self._share)

    def _share(self) -> None:
        self._unfair = False
        self._advance()
        key = self._claim.tobytes()
        if key not in self._shared:
            rows = np.flatnonzero(self._claim)
            capacity = np.array([link.bytes_per_second for link in self._links.values()])
            rates = np.zeros(len(self._rate))
            claims = self._claim[rows]
            rates[rows] = fair_rates(self._weights[rows], self._most[rows], capacity, claims)
            self._shared[key] = rates
        self._rate[:] = self._shared[key]
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        moving = self._rate > 0
        if moving.any():
            seconds = float((self._left[moving] / self._rate[moving]).min())
            self._alarm = self._clock.after(max(0.0, seconds), self._end)

    def _end(self) -> None:
        """One or more of the messages under way have departed."""
        self._alarm = None
        self._advance()
        nothing = NOTHING_BYTES + 1e-12 * self._clock.now * self._rate
        for row in np.flatnonzero((self._rate > 0) & (self._left <= nothing)):
            self._depart(self._rows[row])
        if not self._unfair:
            self._set_alarm()

    def _depart(self, way: _Connection) -> None:
        message = way.queue.popleft()
        way.queued_bytes -= message.size_bytes
        for link, weight in way.links.items():
            link.carried_bytes += message.size_bytes * weight
        if self.on_carried is not None:
            seconds = self._clock.now - message.began
            self.on_carried(way.name, message.size_bytes, message.began, seconds)
        way.sent_bytes += message.size_bytes
        self._tell_departed(way)
        self._clock.after(way.latency_seconds, message.arrived)
        if way.queue:
            way.queue[0].began = self._clock.now
            self._left[way.row] = way.queue[0].size_bytes
            self._set_claim(way, way.claim)
        else:
            self._rate[way.row] = 0.0
            self._set_claim(way, 0.0)

    def _tell_departed(self, way: _Connection) -> None:
        taken = way.sent_bytes + self._held_bytes + ROUNDING_BYTES
        while way.departing and way.departing[0][0] <= taken:
            self._clock.after(0.0, way.departing.popleft()[1])


def fair_rates(weights: Numbers, most: Numbers, capacity: Numbers, claims: Numbers) -> Numbers:
    """Fill the fullest link by claims, then the next with what is left, until all have a rate.

    One row of `weights` for each connection: how many times each link is used by it.
    """
    crosses = weights > 0
    waiting = crosses.any(axis=1)
    rates = np.where(waiting, 0.0, most)  # over no link only its own limit holds it
    claimed = weights * claims[:, None]
    used, free = claimed[waiting].sum(axis=0), capacity.astype(np.float64)
    bounded = most < math.inf
    some_bounded, left = bool(bounded.any()), int(waiting.sum())
    share = np.empty(len(free))
    while left:
        share.fill(math.inf)
        np.divide(free, used, out=share, where=used > 1e-9)
        least = max(0.0, float(share.min()))
        slow = waiting & (most < least * claims) if some_bounded else NOBODY
        if slow.any():  # no link is what holds these up: what they leave is for the others
            chosen = waiting & (most / claims <= (most / claims)[slow].min())
            rates[chosen] = most[chosen]
        else:
            fullest = share <= least * (1 + 1e-12)
            chosen = waiting & crosses[:, fullest].any(axis=1)
            rates[chosen] = least * claims[chosen]
        free -= rates[chosen] @ weights[chosen]
        np.maximum(free, 0.0, out=free)
        used -= claimed[chosen].sum(axis=0)
        waiting &= ~chosen
        left = int(waiting.sum())
    return rates
