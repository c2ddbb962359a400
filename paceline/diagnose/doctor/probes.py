"""What lies between two members: reachability, round trip, clock offset, bandwidth.

Every member keeps a `Door` open during an examination, on a port of the kernel's choice, because
that is the kind of port that training opens; whoever knows the examination's token may knock.
"""

import contextlib
import errno
import hmac
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 10.0
NUM_PINGS = 12
BURST_SECONDS = 0.15
FIRST_BURST_BYTES = 2**18
LARGEST_BURST_BYTES = 2**28
TOKEN_BYTES = 16
TOKEN_SECONDS = 2.0
VISITORS_AT_ONCE = 64
"""That have not shown the token."""


_HEADER = struct.Struct("!cQ")
_TIME = struct.Struct("!d")

Clock = Callable[[], float]
"""Seconds since 1970, as this host believes; a test brings a wrong one."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What `source` found on its way to `target`."""

    source: str
    target: str
    address: str
    """Where it knocked: host:port."""

    problem: str = ""
    """Empty, or how it failed: dropped, refused, unroutable, or the system's own words."""

    answers_at: str = ""
    """Another address of the target that does answer, where the announced one does not."""

    round_trip_seconds: float | None = None
    clock_offset_seconds: float | None = None
    """Seconds that the target's clock is ahead."""

    bandwidth_bits_per_second: float | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A member as the others know it."""

    member: str
    address: str
    port: int
    other_addresses: tuple[str, ...] = ()


class Door:
    """Answers the others' probes from a thread of its own, until closed."""

    def __init__(self, token: bytes, clock: Clock = time.time) -> None:
        # On all interfaces, so that a prober can tell a wrong interface from a closed port.
        self._listener = socket.create_server(("", 0))
        self.port = int(self._listener.getsockname()[1])
        self._token, self._clock = token, clock
        self._closing = threading.Event()
        self._visits: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._serve, name="doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=ANSWER_SECONDS)
        self._listener.close()

    def _serve(self) -> None:
        """Who shows the token gets a thread; of those who have not, the first to come goes first:
        silent ones hold up nobody, however many they are."""
        with selectors.DefaultSelector() as selector:
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing.is_set():
                for event, _ in selector.select(0.1):
                    if event.data is None:
                        self._admit(selector)
                    elif event.data.fileno() >= 0:  # else it had to go in this very turn
                        self._hear(selector, event.data)
            for visitor in self._silent(selector):
                _drop(selector, visitor)
        for visit in self._visits:
            visit.join(timeout=TOKEN_SECONDS)

    def _silent(self, selector: selectors.BaseSelector) -> list["_Visitor"]:
        """Who has come and not shown the token, in the order they came."""
        return [key.data for key in selector.get_map().values() if key.data is not None]

    def _admit(self, selector: selectors.BaseSelector) -> None:
        try:
            visitor = _Visitor(self._listener.accept()[0])
        except OSError as error:  # it has gone meanwhile, or there is no room: all strangers go
            no_room = error.errno in (errno.EMFILE, errno.ENFILE)
            for stranger in self._silent(selector) if no_room else ():
                _drop(selector, stranger)
            return
        selector.register(visitor, selectors.EVENT_READ, visitor)
        silent = self._silent(selector)
        if len(silent) > VISITORS_AT_ONCE:
            _drop(selector, silent[0])

    def _hear(self, selector: selectors.BaseSelector, visitor: "_Visitor") -> None:
        said = visitor.hear()
        if said is None:
            return
        selector.unregister(visitor)
        if not hmac.compare_digest(said, self._token):
            visitor.peer.close()
            return
        self._visits = [visit for visit in self._visits if visit.is_alive()]
        self._visits.append(
            threading.Thread(target=self._attend, args=(visitor.peer,), daemon=True)
        )
        self._visits[-1].start()

    def _attend(self, visitor: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error), visitor:
            visitor.settimeout(ANSWER_SECONDS)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._answer(visitor)

    def _answer(self, visitor: socket.socket) -> None:
        """Pings are answered with the time, bursts with a sign that all has come."""
        space = memoryview(bytearray(2**18))
        while header := receive(visitor, _HEADER.size):
            kind, size = _HEADER.unpack(header)
            while size and (count := visitor.recv_into(space, min(size, len(space)))):
                size -= count
            visitor.sendall(_TIME.pack(self._clock()) if kind == b"p" else b"." * _TIME.size)


class _Visitor:
    """One who has knocked and not shown the token yet."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer, self._said = peer, b""
        peer.setblocking(False)

    def fileno(self) -> int:
        return self.peer.fileno()

    def hear(self) -> bytes | None:
        """What it says, once that is as long as a token or it has gone; None until then."""
        try:
            more = self.peer.recv(TOKEN_BYTES - len(self._said))
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._said += more
        return self._said if not more or len(self._said) == TOKEN_BYTES else None


def _drop(selector: selectors.BaseSelector, visitor: _Visitor) -> None:
    selector.unregister(visitor)
    visitor.peer.close()


def probe(
    source: str, target: Target, token: bytes, *, bandwidth: bool, clock: Clock = time.time
) -> Pair:
    """Knock at `target` and measure. Takes at most some seconds, whatever happens."""
    pair = Pair(source=source, target=target.member, address=f"{target.address}:{target.port}")
    problem = reach(target.address, target.port)
    if problem:
        others = (a for a in target.other_addresses if not reach(a, target.port, 1.0))
        return msgspec.structs.replace(pair, problem=problem, answers_at=next(others, ""))
    try:
        with socket.create_connection((target.address, target.port), CONNECT_SECONDS) as door:
            door.settimeout(ANSWER_SECONDS)
            door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            door.sendall(token)
            round_trip, offset = _ping(door, clock)
            rate = _burst(door) if bandwidth else None
    except (OSError, struct.error) as error:
        return msgspec.structs.replace(pair, problem=f"it answered and then failed: {error}")
    return msgspec.structs.replace(
        pair,
        round_trip_seconds=round_trip,
        clock_offset_seconds=offset,
        bandwidth_bits_per_second=rate,
    )


def reach(host: str, port: int, timeout_seconds: float = CONNECT_SECONDS) -> str:
    """Empty when somebody listens at host:port, else how the attempt failed."""
    try:
        socket.create_connection((host, port), timeout_seconds).close()
    except TimeoutError:
        return "dropped"
    except ConnectionRefusedError:
        return "refused"
    except socket.gaierror:
        return "unknown name"
    except OSError as error:
        unroutable = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)
        return "unroutable" if error.errno in unroutable else str(error)
    return ""


def receive(peer: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes; fewer only when the peer has closed."""
    content = b""
    while len(content) < size and (more := peer.recv(size - len(content))):
        content += more
    return content


def _ping(door: socket.socket, clock: Clock) -> tuple[float, float]:
    """Round trip and clock offset, from the quickest of several: queues only ever add."""
    samples: list[tuple[float, float]] = []
    for _ in range(NUM_PINGS):
        started, sent = time.perf_counter(), clock()
        door.sendall(_HEADER.pack(b"p", 0))
        (theirs,) = _TIME.unpack(receive(door, _TIME.size))
        round_trip = time.perf_counter() - started
        samples.append((round_trip, theirs - (sent + round_trip / 2)))
    return min(samples)


def _burst(door: socket.socket) -> float:
    """Bits per second of a transfer that lasts long enough to tell."""
    size = FIRST_BURST_BYTES
    while True:
        seconds = _send(door, size)
        if seconds >= BURST_SECONDS or size >= LARGEST_BURST_BYTES:
            return 8 * size / seconds
        size = min(LARGEST_BURST_BYTES, 4 * size)


def _send(door: socket.socket, size: int) -> float:
    piece = memoryview(bytearray(min(size, 2**18)))
    started = time.perf_counter()
    door.sendall(_HEADER.pack(b"b", size))
    for _ in range(0, size, len(piece)):  # every size is a multiple of a piece
        door.sendall(piece)
    receive(door, _TIME.size)
    return time.perf_counter() - started
