"""The job's secret, and what is derived from it: proofs of membership and session keys."""

import hmac
import secrets

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32


class JobKey:
    """Everyone who knows the secret is a member; no other process is."""

    def __init__(self, secret: str) -> None:
        assert secret, "a job of several members has a key"
        self._secret = secret.encode()

    @classmethod
    def random(cls) -> "JobKey":
        return cls(secrets.token_hex(KEY_BYTES))

    def derive(self, purpose: bytes, *parts: bytes) -> bytes:
        """Return 32 bytes that only a member can compute, different for each purpose and parts."""
        content = b"".join(len(part).to_bytes(4, "little") + part for part in (purpose, *parts))
        return hmac.digest(self._secret, content, "sha256")

    def matches(self, proof: bytes, purpose: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(self.derive(purpose, *parts), proof)

    def session_keys(self, shared: bytes, *transcript: bytes) -> tuple[bytes, bytes]:
        """Return one key for each direction of a connection: caller to listener, and back.

        `shared` is the secret of an ephemeral Diffie-Hellman exchange: who learns the job's key
        later cannot read what was recorded before.
        """
        salt = self.derive(b"session", *transcript)
        hkdf = HKDF(SHA256(), length=2 * KEY_BYTES, salt=salt, info=b"paceline channel")
        keys = hkdf.derive(shared)
        return keys[:KEY_BYTES], keys[KEY_BYTES:]
