"""Segments are shared between processes and vanish with them, kill -9 included."""

import os
import signal
import subprocess
import sys

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
    fields = ",".join(str(getattr(segment.ticket, f)) for f in Ticket.__struct_fields__)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, f"[{fields}]"],
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


def test_another_file_under_the_same_number_is_refused():
    segment = Segment.create(100)
    other = Segment.create(100)
    forged = Ticket(
        os.getpid(), other.ticket.descriptor, other.ticket.size_bytes, segment.ticket.inode
    )
    with pytest.raises(ExchangeError, match="no longer holds"):
        Segment.attach(forged)
    segment.close()
    other.close()
