"""How a worker that ends is noticed: by its connections, whatever holds on to its memory."""

import multiprocessing
import os
import signal
import time

import pytest
from torch.distributed import HashStore, TCPStore

from paceline.collectives.crew import Crew, Progress
from paceline.launch import Identity

SECONDS = 60.0


def identity(index, workers=2):
    return Identity(
        index=index,
        workers=workers,
        host="here",
        address="127.0.0.1",
        local_index=index,
        local_members=workers,
        launcher="paceline",
        key="a key of this test",
    )


def be_worker_1(port, forks):
    store = TCPStore("127.0.0.1", port, is_master=False)
    crew = Crew(identity(1), store, deadline_seconds=SECONDS)
    left = 0
    if forks:
        left = os.fork()  # as a loader's process, which outlives its parent for seconds
        if left == 0:
            time.sleep(2 * SECONDS)
            os._exit(0)
    store.set("left", str(left))
    assert not crew.is_short
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("forks", [False, True])
def test_a_process_that_ends_is_lost_even_if_one_that_it_forked_lives_on(forks):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.testing", "torch._dynamo", "paceline.models"])
    other = context.Process(target=be_worker_1, args=(store.port, forks))
    other.start()
    crew = Crew(identity(0), store, deadline_seconds=SECONDS)
    try:
        left = int(store.get("left"))
        end = time.monotonic() + SECONDS / 2
        while not crew.is_short and time.monotonic() < end:
            time.sleep(0.01)
        assert crew.is_short
    finally:
        crew.close()
        other.kill()
        other.join()
        if forks:
            os.kill(left, signal.SIGKILL)
    assert other.exitcode == -signal.SIGKILL


def test_one_worker_meets_nobody_and_is_over_at_once():
    crew = Crew(identity(0, workers=1), HashStore(), deadline_seconds=SECONDS)
    assert crew.finish(Progress(), lambda regroup: None) == ()
    crew.close()


def test_a_crew_whose_watching_thread_has_seen_the_end_closes():
    crew = Crew(identity(0, workers=1), HashStore(), deadline_seconds=SECONDS)
    crew._closing = True
    crew._mailbox.wake()
    crew._thread.join(SECONDS)
    assert not crew._thread.is_alive()
    crew.close()
