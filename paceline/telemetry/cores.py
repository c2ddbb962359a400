"""CPU time of threads, and time spent waiting for a core, from the kernel's scheduler.

A thread that is ready to run and has no core is delayed, and the kernel adds that up. It is the one
figure that tells a slow computation from a computation without a core.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

PROCESSES = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def waited_seconds() -> float | None:
    """Seconds that this process's main thread, which computes, was ready to run and had no core.

    None where the kernel does not count it.
    """
    try:
        with open(f"/proc/self/task/{os.getpid()}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def busy_machine_seconds() -> float:
    """Seconds of all cores of the machine together that were used, by any process."""
    times = psutil.cpu_times()
    # guest time is inside user time already; stolen time was used by another machine.
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def children_seconds(pid: int) -> float:
    """CPU seconds of the processes that `pid` started and that still run, and of theirs.

    A data loader's reading processes use the same cores as the training that waits for them. Those
    that have ended are in the process's own account. 0 where the kernel does not list children.
    """
    return sum(_used_seconds(child) + children_seconds(child) for child in _children(pid))


def _children(pid: int) -> Iterator[int]:
    """Each thread has a list of those it started; one that ends meanwhile has none."""
    with suppress(OSError):
        for thread in os.listdir(PROCESSES / str(pid) / "task"):
            with suppress(OSError):
                listed = (PROCESSES / str(pid) / "task" / thread / "children").read_text()
                yield from map(int, listed.split())


def _used_seconds(pid: int) -> float:
    """Own time, and that of children that have ended."""
    try:
        content = (PROCESSES / str(pid) / "stat").read_text()
    except OSError:
        return 0.0
    ticks = content.rpartition(")")[2].split()[11:15]  # the name before may hold anything
    return sum(map(int, ticks)) / TICKS_PER_SECOND
