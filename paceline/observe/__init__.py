"""Observe a training job that Paceline did not start, and import the traces it left behind.

    torchrun --nproc-per-node 4 -m paceline.observe train.py

or, in the script, `import paceline.observe` and then `paceline.observe()`. The job trains as
before: no exchange is replaced, and its weights, exit status and signals stay the same. The result
is an ordinary run folder, so `paceline explain`, `report` and `watch` read it.

place      which rank this process is, and which folder its record goes to
session    what one process records, from its start to its end
hooks      where the phases of a step are seen: loader, model, backward, optimizer
calls      where Python itself waits for an exchange
ring       the flight recorder's ring buffer, read about once a second
clocks     the clocks of several hosts, aligned by the ends of their collectives
waiting    waiting for a late rank, told apart from transfer
hangs      who waits in which collective for whom; watchdog asks it while a job stands still
finish     from the files of all ranks to a summary and a verdict
"""

import sys
from types import ModuleType

__all__ = ["observe"]


def observe(folder: str = "") -> None:
    """Observe this process from now on; `folder` is where the record goes (default: in runs/)."""
    from paceline.observe.session import start

    start(folder)


class _Callable(ModuleType):
    """Makes `paceline.observe()` a call although `paceline.observe` is a module."""

    def __call__(self, folder: str = "") -> None:
        observe(folder)


sys.modules[__name__].__class__ = _Callable
