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
    from paceline.training.session import distribute, init, shard

__all__ = ["__version__", "distribute", "init", "shard"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("paceline.training.session"), name)
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")
