"""A port that no other process gets, for a listener that does not exist yet."""

import socket


def reserve(address: str) -> socket.socket:
    """Hold a port of the kernel's choice at `address` until the socket is closed.

    It is bound and never listens, so a process that asks the kernel for a port is given another
    one, while a listener that names this one and allows reuse, as torch's store does, still gets
    it.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder
