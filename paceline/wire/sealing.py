"""What is said on one connection after the handshake, unreadable and unchangeable for others.

Used where little is said: notes in the store. Each frame is covered by a stream of SHAKE-256 and
vouched for by BLAKE2b, both keyed with a secret of this connection, this direction and this frame,
so that none can be read, changed, left out, moved or played again.
"""

import hashlib
import hmac
import struct

import numpy as np

from paceline.errors import ExchangeError

LENGTH = struct.Struct("<I")
TAG_BYTES = 16
LARGEST_BYTES = 2**32 - 1


class Seal:
    """One direction of one connection."""

    def __init__(self, session: bytes, direction: str) -> None:
        self._secret = hashlib.blake2b(direction.encode(), key=session).digest()
        self._count = 0

    def close(self, content: bytes) -> bytes:
        """A frame to send: its length, its tag, what it covers."""
        if len(content) + TAG_BYTES > LARGEST_BYTES:
            raise ExchangeError(f"a note of {len(content)} bytes is too large for the store.")
        cover, key = self._next(len(content))
        covered = _xor(content, cover)
        return LENGTH.pack(TAG_BYTES + len(covered)) + _tag(covered, key) + covered

    def open(self, frame: bytes) -> bytes:
        """What a frame (without its length) covers; ExchangeError where it is not the next one."""
        tag, covered = frame[:TAG_BYTES], frame[TAG_BYTES:]
        cover, key = self._next(len(covered))
        if not hmac.compare_digest(tag, _tag(covered, key)):
            raise ExchangeError("what came was changed on its way.")
        return _xor(covered, cover)

    def _next(self, size: int) -> tuple[bytes, bytes]:
        number = self._count.to_bytes(8, "little")
        self._count += 1
        stream = hashlib.shake_256(self._secret + number).digest(64 + size)
        return stream[64:], stream[:64]


def _tag(covered: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(covered, key=key, digest_size=TAG_BYTES).digest()


def _xor(content: bytes, cover: bytes) -> bytes:
    left, right = (np.frombuffer(part, dtype=np.uint8) for part in (content, cover))
    return (left ^ right).tobytes()
