"""Unacknowledged bytes on the connections of a process, as the kernel reports them."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_ESTABLISHED, _CALLING = "01", "02"


class Unheard(NamedTuple):
    """Another end that does not acknowledge what was sent to it again and again."""

    address: str
    num_bytes: int
    is_call: bool
    """The other end has not accepted the connection yet."""

    def words(self, member: str, other: str | None = None) -> str:
        """`member` has this end; `other` the one that does not answer, where that is known."""
        there = f"{other} at {self.address}" if other else self.address
        if self.is_call:
            return f"nobody at {self.address} answers {member}"
        return f"{there} does not acknowledge {self.num_bytes} bytes of {member}'s"


def unheard(process: psutil.Process) -> list[Unheard]:
    """Connections of the process on which the kernel sends again, in vain so far."""
    found = []
    for family, fields in _sockets(process):
        state, unsent, again = fields[3], int(fields[4].split(":")[0], 16), fields[6]
        if state in (_ESTABLISHED, _CALLING) and int(again, 16) > 0:
            found.append(Unheard(_address(family, fields[2]), unsent, state == _CALLING))
    return [end for end in found if end.is_call or end.num_bytes]


def own_addresses(process: psutil.Process) -> set[str]:
    """Return the process's own ends, connected or listening."""
    return {_address(family, fields[1]) for family, fields in _sockets(process)}


def _sockets(process: psutil.Process) -> Iterator[tuple[socket.AddressFamily, list[str]]]:
    """The kernel's line for each TCP socket of the process, in fields."""
    own = _inodes(process.pid)
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in own:
                    yield family, fields


def _inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _address(family: int, text: str) -> str:
    """Decode the kernel's hexadecimal words, each in the host's byte order."""
    host, port = text.split(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"
