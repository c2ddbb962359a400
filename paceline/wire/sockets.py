"""How connections are opened: TCP between hosts, a Unix socket without a file inside one."""

import fcntl
import os
import secrets
import socket
import struct
import termios

CONNECT_SECONDS = 30.0
BACKLOG = 1024

_LOOPBACK_BYTES = 512 << 10
"""What the kernel buffers of unsent bytes inside one host: more would fall out of the cores' cache
before it is read. Between hosts the kernel finds the right size."""

_UNSENT_BYTES = 256 << 10
"""What the kernel buffers for another host beyond what is in flight: nothing can overtake it."""


def listen(address: str = "") -> tuple[socket.socket, str]:
    """Return a listening socket and its endpoint, which `connected` takes.

    The address is `HOST:PORT`, `HOST` for a free port, or `@NAME` for a Unix socket. Without one it
    is a Unix socket with a random name.
    """
    endpoint = address or f"@paceline-{secrets.token_hex(16)}"
    if endpoint.startswith("@"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + endpoint[1:])
        listener.listen(BACKLOG)
        return listener, endpoint
    host, _, port = address.rpartition(":") if ":" in address else (address, "", "0")
    listener = socket.create_server((host, int(port)), backlog=BACKLOG)
    return listener, f"{host}:{listener.getsockname()[1]}"


def connected(endpoint: str, seconds: float = CONNECT_SECONDS) -> socket.socket:
    """Connect; raises PermissionError if a process of another user listens at a Unix socket."""
    if not endpoint.startswith("@"):
        host, _, port = endpoint.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(seconds)
        connection.connect("\0" + endpoint[1:])
        _require_own_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def accepted(listener: socket.socket) -> socket.socket:
    """Accept the next connection; OSError if there is none, or it is another user's."""
    connection, _ = listener.accept()
    try:
        if connection.family == socket.AF_UNIX:
            _require_own_user(connection)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        connection.close()
        raise
    return connection


def bound_buffers(connection: socket.socket) -> None:
    """Have the kernel buffer no more unsent bytes than the way to the other end needs."""
    if connection.family == socket.AF_UNIX:
        return
    if connection.getsockname()[0] == connection.getpeername()[0]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def unacknowledged(connection: socket.socket) -> int:
    """Return how many bytes the kernel still has to bring to the other end; 0 within one host."""
    if connection.family == socket.AF_UNIX or connection.fileno() < 0:
        return 0
    queued: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return queued


def _require_own_user(connection: socket.socket) -> None:
    """Raise unless a process of this user, or of root, is at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    if struct.unpack("3i", found)[1] not in (0, os.geteuid()):
        raise PermissionError("the process at the other end belongs to another user")
