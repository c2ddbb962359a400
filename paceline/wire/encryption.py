"""Records: what an encrypted connection carries in place of plain bytes.

    length of the content (4 bytes) | content, encrypted by AES-256-GCM | tag (16 bytes)

Each direction has a key of its own, which exists for this connection only, and the nonce is the
number of the record. So a record that was changed, left out, moved, repeated or sent back does not
open. A payload is encrypted from the memory it is in and decrypted into the memory where it
belongs; the ciphertext between the two fits into a core's cache.
"""

import struct
from collections import deque

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

HEADER = struct.Struct("<I")
TAG_BYTES = 16
NONCE_BYTES = 12
RECORD_BYTES = 128 << 10
"""Content of one record, at most."""

_ROOM_BYTES = 4 * (HEADER.size + RECORD_BYTES + TAG_BYTES)
_OVERHEAD = HEADER.size + TAG_BYTES


class Sealer:
    """Encrypts one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0
        self._room = memoryview(bytearray(_ROOM_BYTES))

    def seal(self, unsent: deque[memoryview | bytes]) -> tuple[memoryview, int]:
        """Take from `unsent` what fits into the room, each part as records of its own.

        Returns the records, which the next call overwrites, and how many bytes they contain.
        """
        room, used, taken = self._room, 0, 0
        while unsent and used + _OVERHEAD < len(room):
            part = unsent[0]
            size = min(len(part), RECORD_BYTES, len(room) - used - _OVERHEAD)
            HEADER.pack_into(room, used, size)
            begin, used = used + HEADER.size, used + _OVERHEAD + size
            nonce = self._number.to_bytes(NONCE_BYTES, "little")
            content = part if size == len(part) else memoryview(part)[:size]
            self._cipher.encrypt_into(nonce, content, None, room[begin:used])
            self._number += 1
            taken += size
            if size == len(part):
                unsent.popleft()
            else:
                unsent[0] = memoryview(part)[size:]
        return room[:used], taken


class Opener:
    """Decrypts the other direction."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._begin = self._end = 0

    @property
    def held(self) -> int:
        """Bytes that have come and are not decrypted yet."""
        return self._end - self._begin

    def free(self) -> memoryview:
        """Return the memory to receive into; at least the rest of the next record fits."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif len(self._room) - self._begin < _OVERHEAD + RECORD_BYTES:
            self._room[: self.held] = bytes(self._room[self._begin : self._end])
            self._begin, self._end = 0, self.held
        return self._room[self._end :]

    def took(self, count: int) -> None:
        self._end += count

    @property
    def has_record(self) -> bool:
        """The next record is whole, or it is longer than a record may be."""
        return self.held >= HEADER.size and self.held >= _OVERHEAD + min(self._size, RECORD_BYTES)

    def next_size(self) -> int:
        """Return how many bytes the next record contains.

        Raises ValueError if that is more than a record may contain.
        """
        if self._size > RECORD_BYTES:
            raise ValueError(f"a record of {self._size} bytes was announced")
        return self._size

    @property
    def _size(self) -> int:
        return int(HEADER.unpack_from(self._room, self._begin)[0])

    def open(self, target: memoryview) -> None:
        """Decrypt the next record into `target`, which has its size.

        Raises ValueError if it is not what the other end sent next; `target` is worthless then.
        """
        begin, end = self._begin + HEADER.size, self._begin + _OVERHEAD + len(target)
        nonce = self._number.to_bytes(NONCE_BYTES, "little")
        try:
            self._cipher.decrypt_into(nonce, self._room[begin:end], None, target)
        except InvalidTag:
            raise ValueError("a record was changed, repeated or moved on its way") from None
        self._number += 1
        self._begin = end
