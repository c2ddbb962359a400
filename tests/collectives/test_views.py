"""How a process that ends is noticed: by its connection to the coordinator, its own process."""

import multiprocessing
import os
import signal
import socket
import time
from contextlib import contextmanager

import pytest

from paceline.collectives.views import Progress, Views
from paceline.errors import ExchangeError
from paceline.launch import Identity, coordinator
from paceline.session import stores

SECONDS = 60.0


def identity(index, port, workers=2):
    return Identity(
        index=index,
        workers=workers,
        host="here",
        address="127.0.0.1",
        coordinator=f"127.0.0.1:{port}",
        local_index=index,
        local_members=workers,
        launcher="paceline",
        key="a key of this test",
        goes_on=True,
    )


def take_part(index, port, workers=2):
    """The store and the views of one worker; worker 0 starts the coordinator."""
    own = identity(index, port, workers)
    store = stores.JobStore(stores.StoreClient(*own.coordinator.split(":"), *asked(own)), None, own)
    return Views(own, store, deadline_seconds=SECONDS)


def asked(own):
    return stores.JobKey(own.key), own.name, SECONDS


@contextmanager
def coordinated(workers=2):
    """A coordinator of its own process, and its store's port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    coordinator.start(listener, identity(0, port, workers))
    process = coordinator._started[-1]
    try:
        yield port, process
    finally:
        process.kill()
        process.wait()


def be_worker_1(port, pipe, forks):
    views, left = take_part(1, port), 0
    if forks:
        left = os.fork()  # as a loader's process, which outlives its parent for seconds
        if left == 0:
            time.sleep(2 * SECONDS)
            os._exit(0)
    pipe.send(left)
    assert not views.must_stop
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("forks", [False, True])
def test_a_process_that_ends_has_failed_even_if_one_that_it_forked_lives_on(forks):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.testing", "torch._dynamo", "paceline.models"])
    with coordinated() as (port, _):
        ours, theirs = context.Pipe()
        other = context.Process(target=be_worker_1, args=(port, theirs, forks))
        other.start()
        views = take_part(0, port)
        try:
            left = ours.recv()
            view = views.next_view(Progress(step=3))
            assert (view.failed, view.participants, views.members) == ((1,), (0,), (0,))
            assert views.finish(Progress(), lambda view: None) == ()
        finally:
            views.close()
            other.kill()
            other.join()
            if forks:
                os.kill(left, signal.SIGKILL)
        assert other.exitcode == -signal.SIGKILL


def test_without_the_coordinator_a_worker_ends_with_a_sentence():
    with coordinated(workers=1) as (port, process):
        views = take_part(0, port, workers=1)
        process.kill()
        with pytest.raises(ExchangeError, match="lost the connection to the job's coordinator"):
            views.next_view(Progress())
        views.close()


def test_the_coordinator_ends_once_no_member_is_connected():
    with coordinated(workers=1) as (port, process):
        views = take_part(0, port, workers=1)
        assert views.finish(Progress(), lambda view: None) == ()
        views.close()
        views.store.close()
        process.wait(timeout=SECONDS)
        assert process.returncode == 0


def test_a_worker_whose_listening_thread_has_ended_closes_all_the_same():
    with coordinated(workers=1) as (port, _):
        views = take_part(0, port, workers=1)
        views._closing = True
        views._mailbox.wake()
        views._thread.join(SECONDS)
        views.close()
