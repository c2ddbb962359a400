"""Being asked to end while members run: noted here, acted on by the one who supervises them."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, `kill`, and a terminal that is closed."""

INTERRUPT_SECONDS = 20.0
"""Time that workers have to save their work before they are ended."""


class Interruption:
    """While it is entered, signals that ask this process to end are only counted.

    One that the process ignores (under nohup, or in a shell's background) stays ignored. Outside
    the main thread, which alone may handle signals, nothing is changed.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
