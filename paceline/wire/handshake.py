"""Before a byte of a connection counts, both ends prove that they know the job's key.

    responder -> initiator    a random number
    initiator -> responder    both names, a random number, a public key, a proof over all of it
    responder -> initiator    a public key, a proof over all of it; nothing if it refuses

A proof holds for these two numbers and these two names, so a recorded one is worth nothing later,
and the purposes differ, so none can be sent back to its author. The job's key never travels. With
encryption the public keys are ephemeral X25519 keys, from which both ends compute the session keys.

Nothing here does input or output: `channel.py` moves the bytes.
"""

import secrets
from typing import TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from paceline.wire.keys import JobKey

HELLO_BYTES = 1024
"""No message of a handshake is longer; a longer one is refused before it is read."""

NONCE_BYTES = 32
_PUBLIC_BYTES = 32

T = TypeVar("T")


class _Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    initiator: str
    responder: str
    nonce: bytes
    public: bytes
    proof: bytes


class _Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    public: bytes
    proof: bytes


class SessionKeys(msgspec.Struct, frozen=True):
    """The keys of one encrypted connection, as one end of it sees them."""

    send: bytes
    receive: bytes


class _End:
    """What both ends of a handshake have in common."""

    def __init__(self, key: JobKey, own: str, peer: str, encrypted: bool) -> None:
        self.own, self.encrypted = own, encrypted
        self.peer = peer
        """The other end's name; empty until a responder knows it."""

        self.done = False
        self.refused = False
        """The other end has another key, or does not begin as a member does."""

        self.keys: SessionKeys | None = None
        self._key = key
        self._private: X25519PrivateKey | None = None

    def _public(self) -> bytes:
        """Return our ephemeral public key; empty without encryption."""
        if not self.encrypted:
            return b""
        self._private = X25519PrivateKey.generate()
        return self._private.public_key().public_bytes_raw()

    def _shared(self, public: bytes) -> bytes:
        assert self._private is not None
        return self._private.exchange(X25519PublicKey.from_public_bytes(public))


class Initiator(_End):
    """The end that opened the connection, to a member that it knows by name."""

    _said: tuple[bytes, ...] = ()

    def answer(self, message: bytes) -> bytes | None:
        """Return what to send next; None once there is nothing more to send."""
        if not self._said:
            return self._hello(message)
        self.done = self._is_welcome(message)
        self.refused = not self.done
        return None

    def _hello(self, challenge: bytes) -> bytes | None:
        if len(challenge) != NONCE_BYTES:
            self.refused = True
            return None
        nonce, public = secrets.token_bytes(NONCE_BYTES), self._public()
        self._said = _transcript(challenge, self.own, self.peer, self.encrypted, nonce, public)
        proof = self._key.derive(b"initiator", *self._said)
        hello = _Hello(self.own, self.peer, nonce, public, proof)
        return msgspec.msgpack.encode(hello)

    def _is_welcome(self, message: bytes) -> bool:
        welcome = _decoded(message, _Welcome)
        if welcome is None:
            return False
        said = (*self._said, welcome.public)
        if not self._key.matches(welcome.proof, b"responder", *said):
            return False
        if self.encrypted:
            keys = self._key.session_keys(self._shared(welcome.public), *said)
            self.keys = SessionKeys(send=keys[0], receive=keys[1])
        return True


class Responder(_End):
    """The end that was called."""

    def __init__(self, key: JobKey, own: str, encrypted: bool) -> None:
        super().__init__(key, own, "", encrypted)
        self.challenge = secrets.token_bytes(NONCE_BYTES)

    def answer(self, message: bytes) -> bytes | None:
        """Return the welcome for a member, and the refusal for an unauthenticated peer.

        None for one that calls somebody else: an address was used again, and it may call again.
        """
        self.refused = True
        hello = _decoded(message, _Hello)
        if hello is None or not hello.initiator:
            return b""
        if hello.responder != self.own:
            return None
        said = _transcript(
            self.challenge, hello.initiator, self.own, self.encrypted, hello.nonce, hello.public
        )
        known = self._key.matches(hello.proof, b"initiator", *said)
        if not known or len(hello.nonce) != NONCE_BYTES:
            return b""
        if len(hello.public) != (_PUBLIC_BYTES if self.encrypted else 0):
            return b""
        public = self._public()
        said = (*said, public)
        if self.encrypted:
            keys = self._key.session_keys(self._shared(hello.public), *said)
            self.keys = SessionKeys(send=keys[1], receive=keys[0])
        self.peer, self.done, self.refused = hello.initiator, True, False
        return msgspec.msgpack.encode(_Welcome(public, self._key.derive(b"responder", *said)))


def _transcript(
    challenge: bytes, initiator: str, responder: str, encrypted: bool, nonce: bytes, public: bytes
) -> tuple[bytes, ...]:
    mode = b"encrypted" if encrypted else b"plain"
    return challenge, initiator.encode(), responder.encode(), mode, nonce, public


def _decoded(message: bytes, kind: type[T]) -> T | None:
    """Return the message; None if an unauthenticated peer sent nonsense, however deeply nested."""
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
