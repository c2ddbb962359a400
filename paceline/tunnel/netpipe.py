"""Latency and bandwidth against message size between hosts: NetPIPE's curve, for all pairs.

An *agent* listens on every host (`paceline net --listen`, or started inside each emulated host).
Whoever measures asks agent A to exchange messages with agent B and gets the figures back. Agents
share a key and answer nobody without it; a message is a JSON object behind its length, and nothing
else is understood.

    python -m paceline.tunnel.netpipe ADDRESS:PORT      an agent; the key comes in PACELINE_KEY
"""

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import select
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

from paceline.errors import DeadlineError, ExchangeError, SpecError
from paceline.tunnel.namespaces import die_with_parent

DEFAULT_PORT = 7717
SIZES_BYTES = tuple(4**power for power in range(14))
"""1 byte to 64 MiB."""

_BUDGET_SECONDS = 0.15
_MOST_REPEATS = 200
_SUSTAINED_SECONDS = 0.02
_LARGEST_STREAM_BYTES = 1 << 24
_DEADLINE_SECONDS = 120.0
_PROVING_SECONDS = 5.0
_STRANGERS = 64
"""So many at once may be about to show that they know the key."""
_AGAIN_SECONDS = 0.1
_FOR_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""Why a call cannot be taken now, and the next one may be."""
_LENGTH = struct.Struct("!I")
_LARGEST_MESSAGE = 1 << 20


def serve(listener: socket.socket, key: str) -> None:
    """Answer askers, each in a thread, until the listener is closed."""
    room = threading.BoundedSemaphore(_STRANGERS)
    while True:
        room.acquire()
        try:
            connection, _ = listener.accept()
        except OSError as error:
            room.release()
            if error.errno not in _FOR_NOW:
                return
            time.sleep(_AGAIN_SECONDS)
            continue
        threading.Thread(target=_answer, args=(connection, key, room), daemon=True).start()


def ask(address: tuple[str, int], request: dict[str, Any], key: str) -> dict[str, Any]:
    """Send one request to an agent and return its answer."""
    with _opened(address, key) as connection:
        _send(connection, request)
        answer = _receive(connection)
    if "error" in answer:
        raise ExchangeError(f"agent at {address[0]}:{address[1]}: {answer['error']}")
    return answer


def measure(
    address: tuple[str, int], sizes_bytes: Sequence[int], key: str
) -> list[dict[str, float]]:
    """Exchange messages of every size with the agent at `address`; one row per size.

    `round_trip_seconds` is there and back; `bits_per_second` is one direction of it, as NetPIPE
    counts, and never more than a direction sustains: while one side answers, the other's cable is
    idle, and one that is shaped saves up for the next message. `both_bits_per_second` is each
    direction while both send at once.
    """
    with _opened(address, key) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _send(connection, {"verb": "echo"})
        sustained = _sustained(connection)
        rows = []
        for size in sizes_bytes:
            buffer = memoryview(bytearray(size))
            there_and_back = _repeat(connection, "pong", buffer, _ping)
            together = _repeat(connection, "swap", buffer, _swap)
            rows.append(
                {
                    "bytes": size,
                    "round_trip_seconds": there_and_back,
                    "bits_per_second": min(8 * size / (there_and_back / 2), sustained),
                    "both_bits_per_second": 8 * size / together,
                }
            )
        _send(connection, {"verb": "end"})
    return rows


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Every two of them, once."""
    return list(combinations(names, 2))


def ask_pair(
    agents: dict[str, tuple[str, int]],
    first: str,
    second: str,
    sizes_bytes: Sequence[int],
    key: str,
) -> dict[str, Any]:
    """Let the agent of `first` measure towards `second`; ask for one pair at a time."""
    host, port = agents[second]
    request = {"verb": "measure", "host": host, "port": port, "sizes": list(sizes_bytes)}
    rows = ask(agents[first], request, key)["rows"]
    return {"from": first, "to": second, "rows": rows}


def wait_for(agents: dict[str, tuple[str, int]], key: str, seconds: float = 20.0) -> None:
    """Return once every agent answers; name those that do not."""
    deadline, missing = time.monotonic() + seconds, set(agents)
    while missing:
        for name in sorted(missing):
            with contextlib.suppress(OSError):
                ask(agents[name], {"verb": "hello"}, key)
                missing.discard(name)
        if missing and time.monotonic() > deadline:
            raise DeadlineError("waiting for network agents", seconds, missing)
        time.sleep(0.02)


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port"; the port may be left out."""
    host, colon, port = text.partition(":")
    known = re.fullmatch(r"[\w.-]+", host, re.ASCII) and (port.isdecimal() or not colon)
    if not known or not 0 <= int(port or DEFAULT_PORT) < 2**16:
        fix = "write such as node1 or 10.0.0.1:7717."
        raise SpecError("host", f"{text!r} is not a host, or a host and a port.", fix)
    return host, int(port) if port else DEFAULT_PORT


def _answer(connection: socket.socket, key: str, room: threading.BoundedSemaphore) -> None:
    # A stranger, or an asker that hung up, ends this connection and nothing else.
    with connection, contextlib.suppress(OSError, ExchangeError):
        try:
            connection.settimeout(_PROVING_SECONDS)
            _challenge(connection, key)
        finally:
            room.release()
        connection.settimeout(_DEADLINE_SECONDS)
        request = _receive(connection)
        try:
            if request.get("verb") == "echo":
                _echo(connection)
            elif request.get("verb") == "measure":
                rows = measure((request["host"], request["port"]), request["sizes"], key)
                _send(connection, {"rows": rows})
            else:
                _send(connection, {"pid": os.getpid()})
        except (OSError, ExchangeError) as error:
            _send(connection, {"error": str(error)})


def _echo(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        order = _receive(connection)
        if order.get("verb") == "end":
            return
        buffer = memoryview(bytearray(order["bytes"]))
        for _ in range(order["repeats"]):
            if order["verb"] == "pong":
                _fill(connection, buffer)
                connection.sendall(buffer)
            elif order["verb"] == "sink":
                _fill(connection, buffer)
                connection.sendall(b"k")
            else:
                _swap(connection, buffer)


def _sustained(connection: socket.socket) -> float:
    """Bits per second of one direction that is never idle: larger messages until they take long
    enough to tell, then the median of some, after the first has used up what was saved."""
    size = 1 << 16
    while True:
        buffer = memoryview(bytearray(size))
        seconds = statistics.median(_timed(connection, "sink", buffer, _stream, 4)[1:])
        if seconds >= _SUSTAINED_SECONDS or size >= _LARGEST_STREAM_BYTES:
            return 8 * size / seconds
        size *= 4


def _stream(connection: socket.socket, buffer: memoryview) -> None:
    connection.sendall(buffer)
    _fill(connection, memoryview(bytearray(1)))


def _repeat(connection: socket.socket, verb: str, buffer: memoryview, exchange: Any) -> float:
    """Median seconds of one exchange: one to get going and to see how many fit, then those."""
    first = _timed(connection, verb, buffer, exchange, 1)[0]
    repeats = max(3, min(_MOST_REPEATS, int(_BUDGET_SECONDS / first)))
    return statistics.median(_timed(connection, verb, buffer, exchange, repeats))


def _timed(
    connection: socket.socket, verb: str, buffer: memoryview, exchange: Any, repeats: int
) -> list[float]:
    _send(connection, {"verb": verb, "bytes": len(buffer), "repeats": repeats})
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        exchange(connection, buffer)
        times.append(time.perf_counter() - began)
    return times


def _ping(connection: socket.socket, buffer: memoryview) -> None:
    connection.sendall(buffer)
    _fill(connection, buffer)


def _swap(connection: socket.socket, buffer: memoryview) -> None:
    """Send and receive at once; return when both are done."""
    sent = received = 0
    connection.setblocking(False)
    try:
        while sent < len(buffer) or received < len(buffer):
            reading = [connection] if received < len(buffer) else []
            writing = [connection] if sent < len(buffer) else []
            readable, writable, _ = select.select(reading, writing, [], _DEADLINE_SECONDS)
            if not readable and not writable:
                raise ExchangeError("the other side stopped answering")
            if readable:
                arrived = connection.recv_into(buffer[received:])
                if arrived == 0:
                    raise ExchangeError("the other side hung up")
                received += arrived
            if writable:
                sent += connection.send(buffer[sent : sent + (1 << 18)])
    finally:
        connection.settimeout(_DEADLINE_SECONDS)


@contextlib.contextmanager
def _opened(address: tuple[str, int], key: str) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=10) as connection:
        connection.settimeout(_DEADLINE_SECONDS)
        nonce = _receive(connection).get("nonce", "")
        _send(connection, {"proof": _proof(key, nonce)})
        if not _receive(connection).get("welcome"):
            raise ExchangeError(f"agent at {address[0]}:{address[1]} has another key")
        yield connection


def _challenge(connection: socket.socket, key: str) -> None:
    nonce = os.urandom(16).hex()
    _send(connection, {"nonce": nonce})
    proof = str(_receive(connection).get("proof", ""))
    welcome = hmac.compare_digest(proof.encode("utf-8", "replace"), _proof(key, nonce).encode())
    _send(connection, {"welcome": welcome})
    if not welcome:
        raise ExchangeError("a stranger asked")


def _proof(key: str, nonce: str) -> str:
    return hmac.new(key.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> dict[str, Any]:
    head = bytearray(_LENGTH.size)
    _fill(connection, memoryview(head))
    (size,) = _LENGTH.unpack(head)
    if size > _LARGEST_MESSAGE:
        raise ExchangeError(f"a message of {size} bytes is not one of ours")
    body = bytearray(size)
    _fill(connection, memoryview(body))
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise ExchangeError("a message is not JSON") from None
    if not isinstance(message, dict):
        raise ExchangeError("a message is not an object")
    return message


def _fill(connection: socket.socket, into: memoryview) -> None:
    while into:
        arrived = connection.recv_into(into)
        if arrived == 0:
            raise ExchangeError("the other side hung up")
        into = into[arrived:]


if __name__ == "__main__":
    die_with_parent()
    with socket.create_server(parse_address(sys.argv[1]), backlog=16) as opened:
        serve(opened, os.environ["PACELINE_KEY"])
