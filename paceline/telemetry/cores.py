"""Who had a core and who waited for one, from the kernel's scheduler.

A thread that is ready to run and has no core is delayed, and the kernel adds that up. It is the one
figure that tells a slow computation from a computation without a core.
"""

import os

import psutil


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
    """Seconds of all cores of the machine together that were used, by whoever."""
    times = psutil.cpu_times()
    # guest time is inside user time already; stolen time was used by another machine.
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)
