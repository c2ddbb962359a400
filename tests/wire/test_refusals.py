"""An attacker on the way changes, repeats, moves, cuts off or sends back what members say.

A relay with real sockets stands between a member and the mailbox or the store that it calls. It
knows how messages are framed, and not the key.
"""

import contextlib
import socket
import struct
import threading
import time

import pytest

from paceline.errors import ExchangeError
from paceline.protocol.messages import Answer, Push
from paceline.wire import Closed, JobKey, Mailbox, Packet, StoreClient, StoreKeeper
from paceline.wire.encryption import RECORD_BYTES, TAG_BYTES
from paceline.wire.store import Get, Set

KEY = JobKey("secret")
SECONDS = 30.0


def flipped(records):
    """One bit of the second record differs."""
    changed = bytearray(records[1])
    changed[-1] ^= 1
    return [records[0], bytes(changed), *records[2:]]


def repeated(records):
    return [records[0], records[0], *records[1:]]


def reordered(records):
    return [records[1], records[0], *records[2:]]


def left_out(records):
    return records[1:]


def truncated(records):
    """The record claims to be complete and lacks its last byte."""
    size = struct.unpack("<I", records[0][:4])[0]
    return [struct.pack("<I", size - 1) + records[0][4:-1], *records[1:]]


def huge(records):
    return [struct.pack("<I", 2**32 - 1) + records[0][4:], *records[1:]]


def longer_than_a_record(records):
    return [struct.pack("<I", RECORD_BYTES + 1) + bytes(RECORD_BYTES + 1 + TAG_BYTES)]


ATTACKS = [flipped, repeated, reordered, left_out, truncated, huge, longer_than_a_record]


class Relay:
    """Passes on a handshake as it is, and the first two records as `attack` returns them."""

    def __init__(self, port, attack=None, reflect=False):
        self._target, self._attack, self._reflect = port, attack, reflect
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.first_message = b""
        self._lines = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        self._lines = [near, far]
        threading.Thread(target=self._back, args=(far, near), daemon=True).start()
        with contextlib.suppress(OSError, EOFError):
            self.first_message = framed(near)
            far.sendall(self.first_message)
            if self._reflect:
                while True:
                    near.sendall(framed(near, TAG_BYTES))
            if self._attack is not None:
                records = [framed(near, TAG_BYTES), framed(near, TAG_BYTES)]
                for record in self._attack(records):
                    far.sendall(record)
            while content := near.recv(65536):
                far.sendall(content)

    def _back(self, far, near):
        with contextlib.suppress(OSError):
            while content := far.recv(65536):
                near.sendall(content)
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)

    def close(self):
        for line in (self._listener, *self._lines):
            line.close()


def framed(line, more=0):
    """One message of the handshake, or one record."""
    head = exactly(line, 4)
    return head + exactly(line, struct.unpack("<I", head)[0] + more)


def exactly(line, count):
    content = b""
    while len(content) < count:
        more = line.recv(count - len(content))
        if not more:
            raise EOFError
        content += more
    return content


@pytest.fixture
def server():
    mailbox = Mailbox("server0", Push | Answer, KEY, encrypted=True)
    mailbox.port = int(mailbox.listen("127.0.0.1").rpartition(":")[2])
    yield mailbox
    mailbox.close()


@pytest.fixture
def worker():
    mailbox = Mailbox("worker0", Push | Answer, KEY, encrypted=True)
    yield mailbox
    mailbox.abandon()


def attacked(server, worker, relay):
    """What the server and the worker get to hear when the worker sends two packets."""
    worker.connect("server0", f"127.0.0.1:{relay.port}")
    for chunk in (1, 2):
        push = Push(worker=0, chunk=chunk, step=0, version=0)
        worker.send(Packet("server0", [push], [b"g" * 500_000], for_server=True))
    heard, back, end = [], [], time.monotonic() + SECONDS
    while time.monotonic() < end and not any(isinstance(e, Closed) for e in heard + back):
        back += worker.receive(0.01)
        heard += server.receive(0.01)
    relay.close()
    return heard, back


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_mailbox_uses_nothing_of_what_was_changed_on_its_way(server, worker, attack):
    heard, _ = attacked(server, worker, Relay(server.port, attack))
    (closed,) = heard
    assert isinstance(closed, Closed)
    assert closed.peer == "worker0"
    assert closed.why


def test_a_mailbox_is_not_deceived_by_its_own_records(server, worker):
    _, back = attacked(server, worker, Relay(server.port, reflect=True))
    (closed,) = back
    assert isinstance(closed, Closed)
    assert closed.why


def test_a_hello_opens_one_connection_only(server, worker):
    relay = Relay(server.port)
    worker.connect("server0", f"127.0.0.1:{relay.port}")
    end = time.monotonic() + SECONDS
    while not server.has_workers and time.monotonic() < end:
        worker.receive(0.01)
        server.receive(0.01)
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(relay.first_message)
        while not server.refused and time.monotonic() < end:
            server.receive(0.01)
        assert server.refused == 1
    relay.close()


def test_what_is_sent_between_hosts_cannot_be_read(server, worker):
    seen = []
    relay = Relay(server.port, lambda records: seen.extend(records) or huge(records))
    attacked(server, worker, relay)
    assert len(seen) == 2
    assert not any(b"gggg" in record or b"Push" in record for record in seen)


@pytest.fixture
def keeper():
    kept = StoreKeeper(socket.create_server(("127.0.0.1", 0)), KEY)
    yield kept
    kept.close()


class StoreRelay(Relay):
    """The client waits for each answer, so its only record is attacked."""

    def _run(self):
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        self._lines = [near, far]
        threading.Thread(target=self._back, args=(far, near), daemon=True).start()
        with contextlib.suppress(OSError, EOFError):
            far.sendall(framed(near))
            record = framed(near, TAG_BYTES)
            far.sendall(self._attack([record, record])[1 if self._attack is flipped else 0])


@pytest.mark.parametrize("attack", [flipped, truncated, huge, longer_than_a_record])
def test_a_store_keeps_nothing_of_what_was_changed_on_its_way(keeper, attack):
    relay = StoreRelay(int(keeper.address[1]), attack)
    client = StoreClient("127.0.0.1", relay.port, KEY, "worker0", SECONDS)
    with pytest.raises((OSError, ExchangeError)):
        client.ask(Set("a", b"1"), SECONDS)
    assert not keeper._notes
    honest = StoreClient("127.0.0.1", int(keeper.address[1]), KEY, "worker1", SECONDS)
    honest.ask(Set("a", b"2"), SECONDS)
    assert honest.ask(Get("a"), SECONDS) == b"2"
    honest.close()
    relay.close()
