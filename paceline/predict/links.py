"""Links that connections share max-min fairly, on a virtual clock.

    links = Links(clock)
    links.add("worker0 out", 125e6, latency_seconds=50e-6)
    links.add("server0 in", 125e6)
    links.send(("worker0", "server0"), ("worker0 out", "server0 in"), 262144, arrived)

A *connection* carries its messages one after the other, as TCP does; connections that are sending
divide every link they cross evenly, and what one cannot use because it is held up elsewhere goes to
the others. A message has *departed* when its last byte has left, and *arrives* after the latencies
of its links. Knows nothing of what is carried.
"""

import heapq
import math
from collections import deque
from collections.abc import Hashable, Sequence

from paceline.predict.clock import Alarm, Clock, Then


class Link:
    """One direction of a cable."""

    def __init__(self, name: str, bytes_per_second: float, latency_seconds: float) -> None:
        self.name, self.bytes_per_second = name, bytes_per_second
        self.latency_seconds = latency_seconds
        self.carried_bytes = 0.0
        self.users: dict[_Connection, None] = {}
        """Connections that are sending over it, in the order in which they began."""


class _Message:
    __slots__ = ("arrived", "departed", "size_bytes")

    def __init__(self, size_bytes: float, arrived: Then, departed: Then | None) -> None:
        self.size_bytes, self.arrived, self.departed = size_bytes, arrived, departed


class _Connection:
    """Messages on one way; the first is under way at `rate` since `since`."""

    def __init__(self, links: tuple[Link, ...], most_bytes_per_second: float) -> None:
        self.links, self.most = links, most_bytes_per_second
        self.latency_seconds = sum(link.latency_seconds for link in links)
        self.queue: deque[_Message] = deque()
        self.left_bytes = self.rate = self.since = 0.0
        self.turn = 0
        """Which of its entries among the endings counts: the last."""


class Links:
    """All links of a cluster and what is under way on them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._connections: dict[Hashable, _Connection] = {}
        self._sending: dict[_Connection, None] = {}
        self._endings: list[tuple[float, int, int, _Connection]] = []
        self._count = 0
        self._unfair = False
        """Somebody has begun or stopped to send since the rates were computed."""
        self._alarm: Alarm | None = None

    def add(self, name: str, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        """Lay a link; its name is used in paths."""
        self._links[name] = Link(name, bytes_per_second, latency_seconds)

    def link(self, name: str) -> Link:
        return self._links[name]

    def send(
        self,
        connection: Hashable,
        path: Sequence[str],
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
            links = tuple(self._links[name] for name in path)
            way = self._connections[connection] = _Connection(links, most_bytes_per_second)
        way.queue.append(_Message(size_bytes, arrived, departed))
        if len(way.queue) == 1:
            way.left_bytes, way.rate, way.since = size_bytes, 0.0, self._clock.now
            self._sending[way] = None
            for link in way.links:
                link.users[way] = None
            self._reconsider()

    def _reconsider(self) -> None:
        """Divide the links anew, once for all that begins or stops at this moment."""
        if not self._unfair:
            self._unfair = True
            self._clock.after(0.0, self._share)

    def _share(self) -> None:
        self._unfair = False
        now = self._clock.now
        for way, rate in _fair_rates(self._sending).items():
            if rate != way.rate:
                way.left_bytes -= way.rate * (now - way.since)
                way.rate, way.since = rate, now
                self._expect(way)
        self._set_alarm()

    def _expect(self, way: _Connection) -> None:
        """Note when the message under way will have departed, in place of what was noted before."""
        self._count += 1
        way.turn = self._count
        seconds = max(way.left_bytes, 0.0) / way.rate
        heapq.heappush(self._endings, (way.since + seconds, self._count, way.turn, way))

    def _set_alarm(self) -> None:
        while self._endings and self._endings[0][2] != self._endings[0][3].turn:
            heapq.heappop(self._endings)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._endings:
            self._alarm = self._clock.at(self._endings[0][0], self._end)

    def _end(self) -> None:
        """The first of the messages under way has departed."""
        self._alarm = None
        moment, _, _, way = heapq.heappop(self._endings)
        message = way.queue.popleft()
        for link in way.links:
            link.carried_bytes += message.size_bytes
        if message.departed is not None:
            self._clock.at(moment, message.departed)
        self._clock.at(moment + way.latency_seconds, message.arrived)
        if way.queue:
            way.left_bytes, way.since = way.queue[0].size_bytes, moment
            self._expect(way)
        else:
            way.turn = 0
            del self._sending[way]
            for link in way.links:
                del link.users[way]
            self._reconsider()
        self._set_alarm()


def _fair_rates(sending: dict[_Connection, None]) -> dict[_Connection, float]:
    """Fill the fullest link evenly, then the next with what is left, until all have a rate."""
    links = {link: None for way in sending for link in way.links}
    free = {link: link.bytes_per_second for link in links}
    waiting = {link: len(link.users) for link in links}
    rates: dict[_Connection, float] = {}

    def settle(way: _Connection, rate: float) -> None:
        rates[way] = rate
        for link in way.links:
            free[link] = max(0.0, free[link] - rate)
            waiting[link] -= 1
            if waiting[link] == 0:
                links.pop(link, None)

    capped = sorted((way for way in sending if way.most < math.inf), key=lambda way: way.most)
    while links:
        fullest = min(links, key=lambda link: free[link] / waiting[link])
        share = free[fullest] / waiting[fullest]
        slow = [way for way in capped if way not in rates and way.most < share]
        if slow:  # the link is not what holds these up: what they leave is for the others
            settle(slow[0], slow[0].most)
            continue
        for way in [way for way in fullest.users if way not in rates]:
            settle(way, share)
    for way in sending:  # over no link at all: only its own limit holds it
        rates.setdefault(way, way.most)
    return rates
