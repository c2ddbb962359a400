"""What strangers send to the ports of a job: nonsense, lies, old words, half ones, silence, floods.

Seeded, and aware of what each port expects: a message has the right form where that leads further
in, and is wrong in one place. Whether the job minds is `siege.py`'s question.
"""

import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

Address = tuple[str, int] | str
"""Of a TCP listener, or the name of an abstract Unix socket."""

TIMEOUT_SECONDS = 5.0
HEARS_SECONDS = 0.2
SLOW_LINES = 40
"""Held open by one stranger at a time, silent or with a byte now and then."""

FLOOD_LINES = 32
"""Opened by one stranger at once, before any of them is closed."""

LYING_SIZES = (0, 1, 64, 1023, 1024, 1025, 4096, 2**24, 2**31, 2**32 - 1)


@dataclass(frozen=True)
class Port:
    """Where a member listens, what it expects to hear, and what was once heard there."""

    name: str
    address: Address
    speaks: str
    """`hello`, `http`, `lines`, `token`; `shut` where the kernel drops every call."""

    recorded: tuple[bytes, ...] = ()
    """What a member said on another connection, word for word."""


Kind = Callable[[socket.socket, Port, random.Random], Iterator[bytes]]


@dataclass
class Stranger:
    """One of several that call at the same ports at once."""

    ports: Sequence[Port]
    seed: int
    sent: Counter[str] = field(default_factory=Counter)
    """Port -> messages that reached it."""

    failed: Counter[str] = field(default_factory=Counter)
    """Port -> calls that came to nothing: its queue was full, or it had closed at once."""

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._slow: list[tuple[socket.socket, Port]] = []

    def attack(self, count: int) -> None:
        """Until so many messages were sent to each port, or it answers nobody any more; in turn,
        all kinds of each."""
        target = {port.name: self.sent[port.name] + count for port in self.ports}
        patience = {port.name: self.failed[port.name] + 2 * count + 500 for port in self.ports}

        def lacks(port: Port) -> bool:
            name = port.name
            return self.sent[name] < target[name] and self.failed[name] < patience[name]

        while waiting := list(filter(lacks, self.ports)):
            for port in waiting:
                if port.speaks == "shut":
                    self._knock(port)
                elif self._chance.random() < 0.01:
                    self._flood(port)
                else:
                    self._say(port)
        for line, _ in self._slow:
            line.close()
        self._slow.clear()

    def _say(self, port: Port) -> None:
        kinds = KINDS[port.speaks]
        kind = self._chance.choice((*kinds, None))
        try:
            line = call(port.address, self._chance)
        except OSError:
            self.failed[port.name] += 1
            return
        self.sent[port.name] += 1
        if kind is None:
            self._stay(line, port)
            return
        with line, contextlib.suppress(OSError):
            for words in kind(line, port, self._chance):
                line.sendall(words)
            if self._chance.random() < 0.3:
                _reset(line)
            elif self._chance.random() < 0.2:
                line.shutdown(socket.SHUT_WR)

    def _stay(self, line: socket.socket, port: Port) -> None:
        """Say nothing, or a byte now and then, and stay."""
        self._slow.append((line, port))
        other = self._chance.randrange(len(self._slow))
        line, port = self._slow[other]
        with contextlib.suppress(OSError):
            line.send(self._chance.choice(port.recorded or (b"x",))[:1])
        if len(self._slow) > SLOW_LINES:
            self._slow.pop(other)[0].close()

    def _flood(self, port: Port) -> None:
        lines = []
        for _ in range(FLOOD_LINES):
            try:
                lines.append(call(port.address, self._chance))
                self.sent[port.name] += 1
            except OSError:
                self.failed[port.name] += 1
        for line in lines:
            line.close()

    def _knock(self, port: Port) -> None:
        """Where nobody is answered: the first packet of a call, and away."""
        line = socket.socket()
        line.setblocking(False)
        with line, contextlib.suppress(BlockingIOError):
            line.connect(port.address)
        self.sent[port.name] += 1


def call(address: Address, chance: random.Random | None = None) -> socket.socket:
    """From any address of this host: each has 28,000 ports to call from, which then need a rest."""
    if isinstance(address, str):
        line = socket.socket(socket.AF_UNIX)
        # With a timeout of Python's own a call would not wait for its turn, but fail at once.
        patience = struct.pack("ll", round(TIMEOUT_SECONDS), 0)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        try:
            line.connect("\0" + address)
        except OSError:
            line.close()
            raise
        line.settimeout(TIMEOUT_SECONDS)
        return line
    numbers = (0, 1) if chance is None else (chance.randrange(256), chance.randrange(1, 255))
    source = "127.0.{}.{}".format(*numbers)
    return socket.create_connection(address, TIMEOUT_SECONDS, (source, 0))


def answers(address: Address) -> bool:
    """Whether a call is taken there at all."""
    try:
        with socket.socket() if isinstance(address, tuple) else call(address) as line:
            if isinstance(address, tuple):
                line.settimeout(0.5)
                line.connect(address)
    except OSError:
        return False
    return True


def _reset(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _hear(line: socket.socket, num_bytes: int = 4096) -> bytes:
    line.settimeout(HEARS_SECONDS)
    try:
        return line.recv(num_bytes)
    finally:
        line.settimeout(TIMEOUT_SECONDS)


def mangled(words: bytes, chance: random.Random) -> bytes:
    """Right but for one place: a bit, a cut, a repetition, something in between."""
    at = chance.randrange(len(words) + 1)
    flipped = bytearray(words)
    flipped[min(at, len(words) - 1)] ^= 1 << chance.randrange(8)
    return chance.choice(
        (
            bytes(flipped),
            words[:at],
            words[:at] + words[:at],
            words[:at] + chance.randbytes(chance.randrange(1, 9)) + words[at:],
            words + chance.randbytes(40),
        )
    )


# What fits every port.


def noise(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    yield chance.randbytes(chance.choice((1, 3, 4, 40, 5000, 100_000)))


def replayed(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    """What a member said, on this connection, which asked something else."""
    for words in port.recorded:
        if port.speaks not in ("http", "token"):  # they do not speak first
            _hear(line)
        yield words


def replayed_at_once(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    yield b"".join(port.recorded)


def nearly(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    wrong = chance.randrange(len(port.recorded))
    for number, words in enumerate(port.recorded):
        yield mangled(words, chance) if number == wrong else words


def of_another_protocol(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    key = b"\x05\0\0\0\0\0\0\0plan0"
    yield chance.choice(
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE" + bytes(47),  # ZeroMQ
            b"\x09\x3c\x85\x75\x3c" + b"\0" + key + key,  # torch's store: validate, set
            b"\x80\x04cos\nsystem\n(S'true'\ntR.",  # pickle
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(32),  # TLS
        )
    )


# The job's own handshake: the store, servers on TCP and on Unix sockets.


def announcement(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    """A length, true or not, and a part of what it announces."""
    yield struct.pack("<I", chance.choice(LYING_SIZES)) + chance.randbytes(chance.randrange(200))


def forged_hello(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    """In the right form, from somebody who does not know the key."""
    name = chance.choice(("worker0", "worker1", "server0", "", "x" * 300, "store", "\ud7ff"))
    sizes = chance.choice(((32, 32), (0, 0), (32, 31), (500, 32), (2, 300)))
    public = chance.choice((b"", chance.randbytes(32), chance.randbytes(500)))
    nonce, proof = map(chance.randbytes, sizes)
    hello = msgspec.msgpack.encode([name, port.name, nonce, public, proof])
    yield struct.pack("<I", len(hello)) + hello
    yield chance.randbytes(100)


def answered_hello(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    """The same after hearing what the other says first, which is then said back as a proof."""
    challenge = _hear(line)[4:]
    proof = chance.choice((challenge, challenge[::-1], bytes(32)))
    hello = msgspec.msgpack.encode(["worker1", port.name, challenge, challenge, proof])
    yield struct.pack("<I", len(hello)) + hello


def other_shapes(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    """msgpack, but not a hello: other types, lying lengths inside, deep nests."""
    hello = chance.choice(
        (
            msgspec.msgpack.encode({"caller": "worker0"}),
            msgspec.msgpack.encode([1, 2, 3]),
            b"\xdf\xff\xff\xff\xff",  # a map of four billion
            b"\xdd\xff\xff\xff\xff" + b"\xc0" * 20,  # a list of them
            b"\x93\xdb\xff\xff\xff\xffworker0",  # a name of four gigabytes
            b"\x91" * 1000,  # a list in a list in a list
            b"\x96\xa7worker0\xa5store\xc4\0\xc4\0\xc4\0" + b"\x91" * 1000,  # behind a hello
            b"\x95\xa2\xff\xfe\xa5store" + 3 * (b"\xc4\x20" + bytes(32)),  # not UTF-8
        )
    )
    yield struct.pack("<I", len(hello)) + hello


# A line of JSON: where members are examined before they train; and the doors they knock at.


def forged_member(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    """A hello in the right form, with something in it that is not."""
    hello = msgspec.json.decode(port.recorded[0])
    field = chance.choice((*hello, "unknown"))
    wrong = (None, -1, 2**63, 10**30, 1.5, "", "x" * 5000, "\u00e9\u2028", [], {}, [[]] * 50)
    hello[field] = chance.choice(wrong)
    if chance.random() < 0.5:
        hello["proof"] = chance.choice(("\u00fc", "0" * 64, chance.randbytes(32).hex()))
    yield json.dumps(hello, ensure_ascii=chance.random() < 0.5).encode() + b"\n"


def strange_json(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    start = port.recorded[0].rstrip()[:-1]
    yield chance.choice(
        (
            b'{"x":' + b"[" * 60_000 + b"\n",
            start + b',"x":' + b'{"":' * 20_000 + b"\n",
            start + b',"x":"\xff\xfe"}\n',
            b'{"proof":"\xff"}\n',
            start.replace(b'"proof":"', b'"proof":"\xc3\x28') + b"}\n",
            b'{"proof":"\\ud800"}\n',
            b"\n" * 1000,
            b'"' + b"a" * chance.choice((1000, 200_000)),
            b'{"index":1e400}\n',
        )
    )


def a_token(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    """Of the right length, and behind it what one who is known may ask."""
    yield chance.randbytes(chance.choice((1, 15, 16, 17)))
    yield chance.choice((b"p", b"b", b"\xff")) + struct.pack("!Q", chance.choice((0, 8, 2**63)))


# HTTP: the live page.


def http(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    path = chance.choice(
        (
            b"/",
            b"/events",
            b"/?token=",
            b"/events?token=" + chance.randbytes(8).hex().encode(),
            b"/?token=%00%ff%f0",
            "/?token=ünglaublich".encode(),
            b"/../../../../etc/passwd",
            b"/%2e%2e/run.json",
            b"//run.json",
            b"/" + b"a" * chance.choice((100, 70_000)),
            b"http://elsewhere.example/",
        )
    )
    method = chance.choice((b"GET", b"HEAD", b"POST", b"OPTIONS", b"TRACE", b"G" * 50, b"\xff"))
    header = chance.choice(
        (
            b"Host: 127.0.0.1",
            b"Host: elsewhere.example",
            b"Content-Length: 99999999999999",
            b"Content-Length: -1",
            b"Transfer-Encoding: chunked\r\nContent-Length: 5",
            b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13",
            b"X: " + b"a" * 70_000,
            b"\xff\xfe: \0",
            b"Range: bytes=0-,0-,0-,0-",
        )
    )
    body = chance.choice((b"", b"5\r\nabc", b"ffffffffffffffff\r\n", chance.randbytes(300)))
    yield method + b" " + path + b" HTTP/1.1\r\n" + header + b"\r\n\r\n" + body
    with contextlib.suppress(OSError):
        _hear(line)


def half_a_request(line: socket.socket, port: Port, chance: random.Random) -> Iterator[bytes]:
    yield b"GET /?token=x HTTP/1.1\r\nHost: 127.0.0.1\r\nX-a: b"[: chance.randrange(1, 50)]


_EVERYWHERE: tuple[Kind, ...] = (noise, of_another_protocol, replayed, replayed_at_once, nearly)
KINDS: dict[str, tuple[Kind, ...]] = {
    "hello": (*_EVERYWHERE, announcement, forged_hello, answered_hello, other_shapes),
    "lines": (*_EVERYWHERE, forged_member, forged_member, strange_json, strange_json),
    "token": (*_EVERYWHERE, a_token, a_token),
    "http": (*_EVERYWHERE, http, http, http, half_a_request),
}
