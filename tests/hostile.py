"""Strangers that call at every port of a job: nonsense, half sentences, silence, floods. Seeded."""

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator, Sequence

import msgspec

Address = tuple[str, int] | str
"""Of a TCP listener, or the name of an abstract Unix socket."""

TIMEOUT_SECONDS = 5.0


def attack(addresses: Sequence[Address], count: int, seed: int) -> int:
    """Send `count` malformed messages, to all addresses in turn; how many could be sent."""
    chance, sent = random.Random(seed), 0
    silent: list[socket.socket] = []
    for number in range(count):
        address = addresses[number % len(addresses)]
        with contextlib.suppress(OSError):
            line = call(address)
            kind = chance.choice(KINDS)
            sent += 1
            if kind is None:  # say nothing, and stay
                silent.append(line)
                if len(silent) > 50:
                    silent.pop(chance.randrange(len(silent))).close()
                continue
            with line:
                for words in kind(line, chance):
                    line.sendall(words)
                if chance.random() < 0.3:
                    reset(line)
    for line in silent:
        line.close()
    return sent


def call(address: Address, timeout_seconds: float = TIMEOUT_SECONDS) -> socket.socket:
    if isinstance(address, str):
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(timeout_seconds)
        line.connect("\0" + address)
        return line
    return socket.create_connection(address, timeout=timeout_seconds)


def answers(address: Address) -> bool:
    try:
        call(address, 0.5).close()
    except OSError:
        return False
    return True


def reset(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def noise(line: socket.socket, chance: random.Random) -> Iterator[bytes]:
    yield chance.randbytes(chance.choice((1, 3, 4, 40, 5000)))


def announcement(line: socket.socket, chance: random.Random) -> Iterator[bytes]:
    """A length, true or not, and a part of what it announces."""
    size = chance.choice((0, 1, 64, 1023, 1024, 1025, 2**24, 2**31, 2**32 - 1))
    yield struct.pack("<I", size) + chance.randbytes(chance.randrange(200))


def forged_hello(line: socket.socket, chance: random.Random) -> Iterator[bytes]:
    """In the right form, from somebody who does not know the key."""
    name = chance.choice(("worker0", "worker1", "server0", "", "x" * 300, "store"))
    hello = msgspec.msgpack.encode([name, chance.randbytes(32), chance.randbytes(32)])
    yield struct.pack("<I", len(hello)) + hello
    yield chance.randbytes(100)


def answered_hello(line: socket.socket, chance: random.Random) -> Iterator[bytes]:
    """The same, after hearing what the other says first."""
    line.settimeout(0.2)
    with contextlib.suppress(OSError):
        line.recv(100)
    yield from forged_hello(line, chance)


def of_another_protocol(line: socket.socket, chance: random.Random) -> Iterator[bytes]:
    key = b"\x05\0\0\0\0\0\0\0plan0"
    yield chance.choice(
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE" + bytes(45),  # ZeroMQ's greeting
            b"\x09\x3c\x85\x75\x3c" + b"\0" + key + key,  # torch's store: validate, set
            b"\x80\x04cos\nsystem\n(S'true'\ntR.",  # pickle
        )
    )


def in_drops(line: socket.socket, chance: random.Random) -> Iterator[bytes]:
    for _ in range(5):
        yield chance.randbytes(1)
        time.sleep(0.002)


KINDS = (
    *(noise, announcement, forged_hello, answered_hello, of_another_protocol, in_drops),
    None,
)
