"""Shut a listener that somebody else's code keeps open and that nobody needs any more.

gloo listens for as long as a group lives, though all its members have met when it is made; whoever
calls later would be taken in, and stay, because it asks nobody who they are. The listener is gloo's
and must not be closed under it, but the kernel can be told to throw away what comes for it.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

import psutil

_SO_ATTACH_FILTER = 26
_RETURN = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A packet filter of one instruction: keep 0 bytes."""


def shut_listeners(met_at: bytes) -> int:
    """No more calls for this process's listeners whose address is part of `met_at`, the note with
    which gloo told the others where to call; returns how many there were."""
    met = [one for one in _listeners() if _packed(*one[1]) in met_at]
    for descriptor, _ in met:
        _shut(descriptor)
    return len(met)


@contextlib.contextmanager
def shut_behind() -> Iterator[None]:
    """No more calls, from here on, for what this process began to listen at inside: nobody else
    of it does meanwhile."""
    before = _listeners()
    yield
    with contextlib.suppress(OSError):
        for descriptor, _ in _listeners() - before:
            _shut(descriptor)


def _listeners() -> set[tuple[int, tuple[str, int]]]:
    """Descriptor and address of each."""
    return {
        (connection.fd, (connection.laddr.ip, connection.laddr.port))
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.fd >= 0
    }


def _shut(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        _attach(listener)


def _packed(address: str, port: int) -> bytes:
    """As in the kernel's own structure, which gloo passes on as it is."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    head = struct.pack("H", family) + struct.pack("!H", port)
    if family == socket.AF_INET:
        return head + socket.inet_pton(family, address)
    return head


def _attach(listener: socket.socket) -> None:
    code = ctypes.create_string_buffer(_RETURN, len(_RETURN))
    program = struct.pack("HL", 1, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
