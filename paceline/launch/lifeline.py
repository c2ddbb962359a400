"""`python -m paceline.launch.lifeline PID COMMAND…`: run a command that ends when process PID does.

A container engine outlives the launcher that called it, so a member inside would too. It keeps the
host's process numbers, and can watch the launcher itself.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence


def run(launcher: int, line: Sequence[str]) -> int:
    """The command's exit status; it is killed, and the status is 1, when `launcher` ends first."""
    try:
        watched = os.pidfd_open(launcher)
    except ProcessLookupError:
        return 1
    child = subprocess.Popen(line, start_new_session=True)
    ended = os.pidfd_open(child.pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: child.send_signal(number))
    waiting = select.poll()
    waiting.register(watched, select.POLLIN)
    waiting.register(ended, select.POLLIN)
    ready = {descriptor for descriptor, _ in waiting.poll()}
    if ended not in ready:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return 1
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
