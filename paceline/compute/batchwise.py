"""Layers in which a sample's output depends on more than the sample: the others of its batch,
chance, or the batches before. Where a batch is computed in parts they see a part, and training is
not the same as with the whole."""

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

NAMED = 3
"""More are counted only."""


def batchwise_layers(model: nn.Module) -> list[str]:
    """Names of the layers that are known to be so; a module of one's own may be another."""
    return [name for name, module in model.named_modules() if _is_batchwise(module)]


def unlike_single(names: Sequence[str], part: str) -> str:
    """A line for the record of a run that computes `part`s of a batch."""
    listed = ", ".join(names[:NAMED])
    if len(names) > NAMED:
        listed += f" and {len(names) - NAMED} more"
    return (
        f"{listed}: what they do to a sample depends on its {part} or on chance (batch norm, "
        "dropout and the like), so losses differ from single's (docs/stages.md)."
    )


def _is_batchwise(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0
    if isinstance(module, _InstanceNorm):  # a sample by itself, but for what it remembers
        return bool(module.track_running_stats)
    return isinstance(module, _NormBase)
