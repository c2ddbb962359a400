"""Members that share a device's memory, without a GPU: a segment of shared memory stands in for it.

Gradients are copied late, and weights are read where they are updated: who is told too early, or
goes another way, trains another curve.
"""

import msgspec
import numpy as np
import pytest
import torch

from paceline.errors import ExchangeError
from paceline.served import device as devices
from paceline.served import device_memory, setup
from paceline.served.device_memory import DeviceTicket
from paceline.served.transports import Local
from paceline.testing import run_members
from paceline.wire import Segment, Ticket
from tests.architectures.test_server import clipped, save_and_resume
from tests.architectures.test_server_device import SlowLane
from tests.architectures.test_server_seats import run
from tests.curves import largest_difference, loss_curve, whole

TIMEOUT_SECONDS = 100.0
KEPT = []
"""Segments, which end with the process as memory of a device does."""


def offer(size_bytes, device):
    segment = Segment.create(size_bytes)
    KEPT.append(segment)
    memory = torch.frombuffer(segment.memory, dtype=torch.uint8)[:size_bytes]
    ticket = DeviceTicket("toy", msgspec.msgpack.encode(segment.ticket), size_bytes)
    return memory, ticket


def reach(ticket, device):
    segment = Segment.attach(msgspec.msgpack.decode(ticket.handle, type=Ticket))
    KEPT.append(segment)
    return torch.frombuffer(segment.memory, dtype=torch.uint8)[: ticket.size_bytes]


def stand_in():
    devices.is_apart, devices.open_lane = lambda device: True, SlowLane
    setup.is_apart = devices.is_apart
    setup.seat_device = lambda options, context: torch.device("cpu")
    device_memory.offer, device_memory.reach = offer, reach


def on_device(session, function, *arguments):
    """Run a function of the tests on a worker that shares a device's memory with the seats."""
    stand_in()
    found = function(session, *arguments)
    exchange = session.architecture._opened
    assert exchange.is_on_device
    assert not exchange.is_apart
    assert not any(isinstance(way, Local) for way in exchange.worker.transports)
    return found


@pytest.fixture(scope="module")
def reference():
    return whole(run_members(loss_curve, workers=1, timeout_seconds=TIMEOUT_SECONDS))


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        pytest.param("chunk=1KiB", 1, marks=pytest.mark.slow),
        ("chunk=1KiB", 2),
        pytest.param("update=worker,chunk=1KiB", 2, marks=pytest.mark.slow),
    ],
)
def test_chunks_handed_over_inside_the_device_train_alike(text, workers, reference):
    parts = run(on_device, loss_curve, workers=workers, text=text)
    assert largest_difference(whole(parts), reference) < 1e-4


@pytest.mark.slow
def test_clipping_and_saved_state():
    expected = run_members(clipped, 0.05, 2, workers=1, timeout_seconds=TIMEOUT_SECONDS)[0]
    for found in run(on_device, clipped, 0.05, 2, workers=2, text="chunk=1KiB"):
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    for first, again in run(on_device, save_and_resume, workers=1, text="chunk=1KiB"):
        np.testing.assert_allclose(again, first, rtol=1e-5)


def weights_after_the_end(session):
    """What a script reads when the exchange is closed, and where that lies."""
    stand_in()
    model = torch.nn.Linear(3, 1)
    torch.nn.init.ones_(model.weight)
    model, optimizer = session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    served = session.architecture._opened.view(0).data_ptr()
    session.close()
    assert model.weight.data_ptr() != served
    return model.weight.tolist()


def test_weights_are_the_scripts_own_when_the_exchange_is_closed():
    for found in run(weights_after_the_end, workers=2, text=""):
        np.testing.assert_allclose(found, [[1 - 4 * 0.1 * 2] * 3], rtol=1e-6)


def one_cannot_reach(session):
    """Worker 1's driver refuses."""
    stand_in()

    def refused(ticket, device):
        raise ExchangeError("opening memory of another process failed with CUDA error 1")

    if session.rank == 1:
        device_memory.reach = refused
    told = []
    session.note = lambda text, kind="note": told.append(text)
    found = loss_curve(session)
    assert not session.architecture._opened.is_on_device
    return found, told


def test_where_one_cannot_reach_it_all_go_through_main_memory_and_it_is_said(reference):
    (first, told), (second, _) = run(one_cannot_reach, workers=2, text="chunk=1KiB")
    assert largest_difference(whole([first, second]), reference) < 1e-4
    assert any("worker1" in text and "CUDA error 1" in text for text in told)
