"""Which member's failure `run_members` tells, however late it looks."""

import os
import signal
import time
from multiprocessing import connection

import pytest

from paceline import testing
from paceline.errors import MemberError
from paceline.testing import run_members

SECONDS = 60.0


@pytest.fixture
def late(monkeypatch):
    """Whoever collects finds that all members have ended: it had to wait for a core."""

    def wait_for_all(pipes, timeout):
        end = time.monotonic() + SECONDS
        while len(ready := connection.wait(pipes, 0.1)) < len(pipes):
            assert time.monotonic() < end
        return ready

    monkeypatch.setattr(testing, "wait", wait_for_all)


def fail_after_worker_1(session, is_killed):
    """Worker 0 fails for having lost worker 1."""
    if session.rank == 1:
        session.store.set("pid", str(os.getpid()))
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the cause")
    pid = int(session.store.get("pid"))
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)
    raise ValueError("worker1 was lost")


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_first_to_fail_is_told_and_not_who_lost_it(late, is_killed):
    with pytest.raises(MemberError) as caught:
        run_members(fail_after_worker_1, is_killed, workers=2)
    assert caught.value.member == "worker1"
    assert ("the cause" in str(caught.value)) != is_killed
