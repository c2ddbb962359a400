"""`ring`: synchronous all-reduce of gradients, bucketed and overlapped by torch's own reducer."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline import spec
from paceline.architectures import group
from paceline.architectures.base import Architecture, Context


def build(options: spec.Ring, context: Context) -> Architecture:
    """Torch's reducer over gloo or NCCL, or ours over MPI."""
    if group.backend_for(context, options.backend) == "mpi":
        from paceline.architectures.mpi import MpiRingArchitecture  # an extra

        return MpiRingArchitecture(options, context)
    return RingArchitecture(options, context)


class RingArchitecture:
    """Every worker sends to the next; nobody holds more than its own weights."""

    def __init__(self, options: spec.Ring, context: Context) -> None:
        self._options, self._context = options, context
        self._model: RingModule | None = None
        group.join(context, group.backend_for(context, options.backend))

    def distribute(
        self, model: torch.nn.Module, optimizer: Optimizer
    ) -> tuple[torch.nn.Module, Optimizer]:
        device, bucket_bytes = self._context.device, self._options.bucket_bytes
        self._model = RingModule(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=None if bucket_bytes is None else bucket_bytes / 2**20,
            gradient_as_bucket_view=True,
        )
        return self._model, optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        assert self._model is not None
        return self._model.no_sync()

    def clip(self, max_norm: float) -> None:
        assert self._model is not None
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def settle(self) -> None:
        pass

    def counters(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        group.leave()


class RingModule(DistributedDataParallel):
    """DDP with the wrapped model's `state_dict` keys, so checkpoints fit every architecture."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)
