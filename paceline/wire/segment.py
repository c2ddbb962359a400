"""Memory that several processes of one host share.

A segment is an anonymous file (memfd): it has no name in any file system and is gone with the last
process that maps it, so nothing is left behind even by kill -9. Another process of the same user
attaches through the creator's /proc entry, given the ticket the creator hands out.
"""

import contextlib
import mmap
import os

import msgspec

from paceline.errors import ExchangeError


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """How another process finds a segment."""

    pid: int
    descriptor: int
    size_bytes: int
    inode: int
    """Tells a segment from another file that took over its number."""


class Segment:
    """A run of shared memory, zero at first."""

    def __init__(self, size_bytes: int, memory: mmap.mmap, ticket: Ticket, descriptor: int) -> None:
        self.size_bytes, self.memory, self.ticket = size_bytes, memory, ticket
        self._descriptor = descriptor

    @classmethod
    def create(cls, size_bytes: int) -> "Segment":
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(size_bytes, mmap.PAGESIZE))
        ticket = Ticket(os.getpid(), descriptor, size_bytes, os.fstat(descriptor).st_ino)
        memory = mmap.mmap(descriptor, max(size_bytes, mmap.PAGESIZE))
        return cls(size_bytes, memory, ticket, descriptor)

    @classmethod
    def attach(cls, ticket: Ticket) -> "Segment":
        path = f"/proc/{ticket.pid}/fd/{ticket.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            problem = f"shared memory of process {ticket.pid} cannot be reached: {error.strerror}"
            raise ExchangeError(f"{problem}; use transport=tcp between containers.") from error
        if os.fstat(descriptor).st_ino != ticket.inode:
            os.close(descriptor)
            raise ExchangeError(f"process {ticket.pid} no longer holds the segment it offered.")
        memory = mmap.mmap(descriptor, max(ticket.size_bytes, mmap.PAGESIZE))
        return cls(ticket.size_bytes, memory, ticket, descriptor)

    def withdraw(self) -> None:
        """Nobody attaches any more: the memory stays mapped, the ticket ends."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        """Let go of the memory; views still in use keep it until they are gone."""
        self.withdraw()
        with contextlib.suppress(BufferError):  # the mapping goes with the last tensor on it
            self.memory.close()
