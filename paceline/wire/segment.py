"""Memory that several processes of one host share.

A segment is an anonymous file (memfd): it has no name in any file system and is gone with the last
process that maps it, so nothing is left behind even by kill -9. Another process of the same user
attaches through the creator's /proc entry, given the ticket the creator hands out. A ticket is not
taken at its word: what it leads to must be a segment of the same user, with the ticket's own random
name, before anything is mapped.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import stat

import msgspec

from paceline.errors import ExchangeError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""On every segment, and on no file with a name: nobody can cut it off under those who map it."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """How another process finds a segment."""

    pid: int
    descriptor: int
    size_bytes: int
    inode: int
    """Tells a segment from another file that took over its number."""

    name: str
    """Made of random digits: who was not given the ticket cannot offer another under it."""


class Segment:
    """A run of shared memory, zero at first."""

    def __init__(self, size_bytes: int, memory: mmap.mmap, ticket: Ticket, descriptor: int) -> None:
        self.size_bytes, self.memory, self.ticket = size_bytes, memory, ticket
        self._descriptor = descriptor

    @classmethod
    def create(cls, size_bytes: int) -> "Segment":
        name = f"paceline-{secrets.token_hex(16)}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, max(size_bytes, mmap.PAGESIZE))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        ticket = Ticket(os.getpid(), descriptor, size_bytes, os.fstat(descriptor).st_ino, name)
        memory = mmap.mmap(descriptor, max(size_bytes, mmap.PAGESIZE))
        return cls(size_bytes, memory, ticket, descriptor)

    @classmethod
    def attach(cls, ticket: Ticket) -> "Segment":
        path = f"/proc/{ticket.pid}/fd/{ticket.descriptor}"
        try:
            _check(path, ticket)
            # What the path leads to may have changed since: the open file itself is looked at too.
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            problem = f"shared memory of process {ticket.pid} cannot be reached: {error.strerror}"
            raise ExchangeError(f"{problem}; use transport=tcp between containers.") from error
        try:
            _check(f"/proc/self/fd/{descriptor}", ticket)
            if _seals(descriptor) != _SEALS:
                raise _refused(ticket, "is not sealed as our segments are")
            memory = mmap.mmap(descriptor, max(ticket.size_bytes, mmap.PAGESIZE))
        except BaseException:
            os.close(descriptor)
            raise
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


def _check(path: str, ticket: Ticket) -> None:
    """Raise where the file at `path` is not the segment of the ticket; opens nothing."""
    # A link as such cannot be refused (O_NOFOLLOW): an anonymous file has no other way to it.
    leads_to, found = os.readlink(path), os.stat(path)
    if found.st_ino != ticket.inode or leads_to != f"/memfd:{ticket.name} (deleted)":
        raise ExchangeError(f"process {ticket.pid} no longer holds the segment it offered.")
    if not stat.S_ISREG(found.st_mode) or found.st_nlink:
        raise _refused(ticket, "is not memory")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o600:
        raise _refused(ticket, "is not this user's alone")
    if not 0 <= ticket.size_bytes <= found.st_size:
        raise _refused(ticket, f"has {found.st_size} bytes, and {ticket.size_bytes} were offered")


def _seals(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # a file that has a place on a disk
        return 0


def _refused(ticket: Ticket, why: str) -> ExchangeError:
    return ExchangeError(f"what process {ticket.pid} offers as shared memory {why}: refused.")
