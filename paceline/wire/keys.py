"""The job's secret and what is made from it: who may join, and encryption between hosts."""

import hashlib
import hmac
import secrets

import zmq
from zmq.utils import z85


class JobKey:
    """Everyone who knows the secret is a member; nobody else is."""

    def __init__(self, secret: str) -> None:
        assert secret, "a job of several members has a key"
        self._secret = secret.encode()

    @classmethod
    def random(cls) -> "JobKey":
        return cls(secrets.token_hex(32))

    def derive(self, purpose: bytes, *parts: bytes) -> bytes:
        """32 bytes that only a member can make, others for every purpose and every part."""
        told = b"".join(len(part).to_bytes(4, "little") + part for part in (purpose, *parts))
        return hmac.digest(self._secret, told, "sha256")

    def matches(self, proof: bytes, purpose: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(self.derive(purpose, *parts), proof)

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """CurveZMQ: only a client that can derive our public key completes the handshake."""
        public, secret = self._pair()
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_server = True

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = self._pair()[0]
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()

    def _pair(self) -> tuple[bytes, bytes]:
        secret = z85.encode(hashlib.sha256(b"curve " + self._secret).digest())
        return zmq.curve_public(secret), secret
