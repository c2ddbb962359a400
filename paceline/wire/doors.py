"""Shut a listener that somebody else's code keeps open and that nobody needs any more.

gloo listens for as long as a group lives, though all its members have met when it is made; whoever
calls later would be taken in, and stay, because it asks nobody who they are. The listener is gloo's
and must not be closed under it, but the kernel can be told to throw away what comes for it.
"""

import ctypes
import os
import socket
import struct

import psutil

_SO_ATTACH_FILTER = 26
_RETURN = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A packet filter of one instruction: keep 0 bytes."""


def shut_listeners(met_at: bytes) -> int:
    """No more calls for this process's listeners whose address is part of `met_at`, the note with
    which gloo told the others where to call; returns how many there were."""
    shut = 0
    for connection in psutil.Process().net_connections("inet"):
        if connection.status != psutil.CONN_LISTEN or connection.fd < 0:
            continue
        if _packed(connection.laddr.ip, connection.laddr.port) in met_at:
            with socket.socket(fileno=os.dup(connection.fd)) as listener:
                _attach(listener)
            shut += 1
    return shut


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
