"""Parcels arrive whole and uncopied; strangers are refused; nothing is left behind."""

import os
import time

import pytest
import zmq

from paceline.errors import ExchangeError
from paceline.protocol import Answer, Push
from paceline.wire import JobKey, Post

KINDS = Push | Answer


def receive(post, count=1, seconds=5.0):
    parcels, end = [], time.monotonic() + seconds
    while len(parcels) < count and time.monotonic() < end:
        parcels += post.receive(0.05)
    return parcels


@pytest.fixture(params=["ipc", "tcp", "curve"])
def pair(request):
    """A server and a worker that know the same key."""
    key, encrypt = JobKey("secret"), request.param == "curve"
    server = Post("server0", KINDS, key, encrypt=encrypt)
    worker = Post("worker0", KINDS, key, encrypt=encrypt)
    endpoint = server.bind("" if request.param == "ipc" else "127.0.0.1")
    worker.connect("server0", endpoint)
    yield server, worker, endpoint
    worker.close()
    server.close()


def test_messages_and_payloads_go_both_ways(pair):
    server, worker, _ = pair
    push = Push(worker=0, chunk=3, step=1, version=1)
    worker.send("server0", [push], [memoryview(b"gradient" * 10000)])
    (parcel,) = receive(server)
    assert parcel.peer == "worker0"
    assert parcel.for_server
    assert parcel.messages == [push]
    assert bytes(parcel.payloads[0]) == b"gradient" * 10000
    server.reply("worker0", [Answer(0, 3, 2), Answer(0, 4, 2)], [b"weights"])
    (parcel,) = receive(worker)
    assert not parcel.for_server
    assert [answer.chunk for answer in parcel.messages] == [3, 4]
    assert bytes(parcel.payloads[0]) == b"weights"


def test_a_stranger_is_refused(pair):
    server, _, endpoint = pair
    stranger = Post("worker1", KINDS, JobKey("guess"), encrypt=False)
    stranger.connect("server0", endpoint)
    stranger.send("server0", [Push(worker=1, chunk=0, step=0, version=0)])
    assert not receive(server, seconds=0.3)
    if endpoint.startswith("ipc") or not server._encrypt:
        assert server.refused > 0
    stranger._dealers["server0"].close(linger=0)
    stranger.close()


def test_nonsense_from_a_member_is_an_error_and_is_not_unpickled(pair):
    server, worker, _ = pair
    worker._dealers["server0"].send(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(ExchangeError, match="cannot read from worker0"):
        receive(server)


def test_a_parcel_to_oneself_is_not_encoded():
    post = Post("worker0", KINDS, JobKey("k"))
    thing = object()
    post.send("worker0", [Push(worker=0, chunk=0, step=0, version=0)], [thing])
    (parcel,) = receive(post)
    assert parcel.payloads[0] is thing
    assert parcel.for_server
    post.close()


def test_a_socket_of_one_host_leaves_no_file():
    server = Post("server0", KINDS, JobKey("k"))
    name = server.bind().removeprefix("ipc://")
    assert name.startswith("@"), "in the abstract name space"
    assert not os.path.exists(name)
    server.close()


def test_wake_ends_a_wait():
    post = Post("worker0", KINDS, JobKey("k"))
    post.wake()
    began = time.monotonic()
    assert post.receive(30.0) == []
    assert time.monotonic() - began < 30
    post.close()


def test_a_reply_to_one_who_is_gone_is_dropped():
    server = Post("server0", KINDS, JobKey("k"))
    server.bind()
    server.reply("worker9", [Answer(9, 0, 0)])
    server.close()


def test_proofs_differ_by_name_and_key():
    key = JobKey("k")
    assert key.accepts("worker0", key.proof("worker0"))
    assert not key.accepts("worker1", key.proof("worker0"))
    assert not key.accepts("worker0", JobKey("l").proof("worker0"))
    assert zmq.has("curve")
