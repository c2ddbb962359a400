"""Seats whose memory is a device's, without a GPU: private memory stands in for it.

What a seat forgets to publish, or is never told of, stays there, and the curve is another one.
"""

import numpy as np
import pytest
import torch

from paceline import spec
from paceline.cli import main
from paceline.served import device_server, setup
from paceline.testing import run_members
from tests.architectures.test_server import clipped, save_and_resume
from tests.curves import largest_difference, loss_curve, whole

TIMEOUT_SECONDS = 100.0


def apart(session, function, *arguments):
    """Run a function of the tests on a worker that serves from memory of its own."""
    setup.seat_device = lambda options, context: torch.device("cpu")
    return function(session, *arguments)


def silent(session):
    """A broken seat: updates stay where they are made."""
    device_server.DeviceServerSide._publish = lambda seat, chunk: None
    return apart(session, loss_curve)


def run(function, *arguments, workers, text):
    architecture = spec.parse_architecture(f"server:device=cuda,placement=colocated,{text}")
    return run_members(
        function,
        *arguments,
        workers=workers,
        architecture=architecture,
        timeout_seconds=TIMEOUT_SECONDS,
    )


@pytest.fixture(scope="module")
def reference():
    return whole(run_members(loss_curve, workers=1, timeout_seconds=TIMEOUT_SECONDS))


@pytest.mark.parametrize(
    ("text", "workers"),
    [("chunk=1KiB", 2), ("chunk=1KiB,transport=tcp", 2), ("mode=async,chunk=1KiB", 1)],
)
def test_seats_with_memory_of_their_own_train_alike(text, workers, reference):
    parts = run(apart, loss_curve, workers=workers, text=text)
    assert largest_difference(whole(parts), reference) < 1e-4


def test_the_comparison_notices_updates_that_are_not_published(reference):
    parts = run(silent, workers=1, text="chunk=1KiB")
    assert not largest_difference(whole(parts), reference) < 1e-3


def test_norms_and_state_come_from_there():
    expected = run_members(clipped, 0.05, 1, workers=1, timeout_seconds=TIMEOUT_SECONDS)[0]
    for found in run(apart, clipped, 0.05, 1, workers=2, text="chunk=1KiB"):
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    for first, again in run(apart, save_and_resume, workers=1, text="chunk=1KiB"):
        np.testing.assert_allclose(again, first, rtol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main.main(["train", "--architecture", "server:device=cuda", "--servers", "1"])
    assert stop.value.code != 0
    assert "leave device=cuda out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
