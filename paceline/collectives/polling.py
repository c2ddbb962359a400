"""Between two looks at what another process does in a moment: flags in shared memory, MPI's."""

import os
import time

SPIN_SECONDS, POLL_SECONDS = 0.2e-3, 50e-6
"""Nobody late: answer at once. Somebody late: leave the core to whoever has work to do."""


def pause(waited_seconds: float) -> None:
    """Let others run. A sleep of no time is none: it takes the 50 us by which the kernel may wake
    a process late, longer than most waits here."""
    if waited_seconds < SPIN_SECONDS:
        os.sched_yield()
    else:
        time.sleep(POLL_SECONDS)
