"""One training script, every classic distributed architecture, and the reason it scales or doesn't.

    import paceline

    paceline.init()                                           # who am I
    model, optimizer = paceline.distribute(model, optimizer)  # the architecture comes from outside
    loader = paceline.shard(loader)                           # this worker's part

Importing this does nothing and loads no torch; the names below load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.session.calls import (
        barrier,
        clip_grad_norm_,
        distribute,
        is_main,
        mean,
        no_sync,
        rank,
        report_loss,
        settle,
        workers,
    )
    from paceline.session.loader.sharding import shard
    from paceline.session.start import init
    from paceline.settings import setting

__all__ = [
    "__version__",
    "barrier",
    "clip_grad_norm_",
    "distribute",
    "init",
    "is_main",
    "mean",
    "no_sync",
    "rank",
    "report_loss",
    "setting",
    "settle",
    "shard",
    "workers",
]

_ELSEWHERE = {
    "init": "paceline.session.start",
    "setting": "paceline.settings",
    "shard": "paceline.session.loader.sharding",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    return getattr(import_module(_ELSEWHERE.get(name, "paceline.session.calls")), name)
