"""Segments are shared between processes and vanish with them, kill -9 included."""

import fcntl
import os
import signal
import subprocess
import sys

import msgspec
import pytest

from paceline.errors import ExchangeError
from paceline.wire import Segment, Ticket

CHILD = """
import sys, msgspec
from paceline.wire import Segment, Ticket
segment = Segment.attach(msgspec.json.decode(sys.argv[1], type=Ticket))
segment.memory[4:8] = b"back"
print("attached", flush=True)
sys.stdin.read()
"""


def test_what_one_process_writes_another_reads_until_it_is_killed():
    segment = Segment.create(1 << 16)
    segment.memory[:4] = b"here"
    ticket = msgspec.json.encode(segment.ticket).decode()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, ticket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout.readline() == b"attached\n"
    assert segment.memory[4:8] == b"back"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert segment.memory[:8] == b"hereback"
    segment.close()


def test_a_ticket_ends_when_it_is_withdrawn():
    segment = Segment.create(100)
    Segment.attach(segment.ticket).close()
    segment.withdraw()
    with pytest.raises(ExchangeError):
        Segment.attach(segment.ticket)
    segment.close()


def test_another_segment_under_the_same_number_is_refused():
    segment, other = Segment.create(100), Segment.create(100)
    forged = msgspec.structs.replace(other.ticket, inode=segment.ticket.inode)
    with pytest.raises(ExchangeError, match="no longer holds"):
        Segment.attach(forged)
    segment.close()
    other.close()


def planted(path, **changed):
    """A ticket of ours that leads to a file which somebody would like to have written to."""
    file = open(path, "r+b")  # noqa: SIM115 - open while the ticket is used
    found = os.fstat(file.fileno())
    name = path.name.removeprefix("memfd:").removesuffix(" (deleted)")
    ticket = Ticket(os.getpid(), file.fileno(), found.st_size, found.st_ino, name)
    return file, msgspec.structs.replace(ticket, **changed)


def test_a_ticket_for_a_file_is_refused_and_the_file_stays_as_it_was(tmp_path):
    path = tmp_path / "precious"
    path.write_bytes(b"x" * 8192)
    file, ticket = planted(path)
    with file, pytest.raises(ExchangeError):
        Segment.attach(ticket)
    assert path.read_bytes() == b"x" * 8192


def memfd(name, size, mode=0o600, sealed=True):
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, mode)
    os.ftruncate(descriptor, size)
    if sealed:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    inode = os.fstat(descriptor).st_ino
    return descriptor, Ticket(os.getpid(), descriptor, 8192, inode, name)


@pytest.mark.parametrize(
    ("mode", "sealed", "size", "why"),
    [
        (0o666, True, 8192, "not this user's alone"),
        (0o600, False, 8192, "not sealed"),
        (0o600, True, 4096, "4096 bytes, and 8192 were offered"),
    ],
)
def test_memory_that_is_not_as_ours_is_refused(mode, sealed, size, why):
    descriptor, ticket = memfd("paceline-0", size, mode, sealed)
    with pytest.raises(ExchangeError, match=why):
        Segment.attach(ticket)
    os.close(descriptor)


def test_a_segment_cannot_be_cut_off_under_those_who_map_it():
    segment = Segment.create(8192)
    attached = Segment.attach(segment.ticket)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.ticket.descriptor, 0)
    attached.close()
    segment.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's memory needs root to be opened")
def test_memory_of_another_user_is_refused():
    descriptor, ticket = memfd("paceline-0", 8192)
    os.fchown(descriptor, 65534, 65534)
    with pytest.raises(ExchangeError, match="not this user's alone"):
        Segment.attach(ticket)
    os.close(descriptor)
