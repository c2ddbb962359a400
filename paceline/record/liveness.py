"""The state of a run: what its files say, and whether the process that writes them is still alive.

running       its launcher is there
finished      every member ended well
failed        a member or the launcher did not
interrupted   somebody asked it to end, by Ctrl-C or a signal
killed        its launcher is gone without a word
"""

import contextlib
import os
import platform
from pathlib import Path

from paceline.record.entries import Entry

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Launcher(Entry, kw_only=True, omit_defaults=False):
    """The process that summarises a run when it ends: pid and start time name it for good."""

    host: str
    boot: str
    """The kernel's name for the time since it was started."""

    pid: int
    start_ticks: int
    """The moment when it was started, in the kernel's ticks since boot."""


def this_process() -> Launcher:
    pid = os.getpid()
    ticks = _start_ticks(pid)
    assert ticks is not None, "this process runs"
    return Launcher(host=platform.node(), boot=_boot(), pid=pid, start_ticks=ticks)


def is_gone(launcher: Launcher) -> bool:
    """Return whether it has certainly ended; a process of another host may still exist."""
    if launcher.host != platform.node():
        return False
    return launcher.boot != _boot() or _start_ticks(launcher.pid) != launcher.start_ticks


def _boot() -> str:
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""


def _start_ticks(pid: int) -> int | None:
    """Return None if there is no such process, or it has ended and its parent has not noticed."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
