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
    from paceline.training.session import (
        clip_grad_norm_,
        distribute,
        init,
        no_sync,
        report_loss,
    )
    from paceline.training.sharding import shard

__all__ = [
    "__version__",
    "clip_grad_norm_",
    "distribute",
    "init",
    "no_sync",
    "report_loss",
    "shard",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    module = "paceline.training.sharding" if name == "shard" else "paceline.training.session"
    return getattr(import_module(module), name)
