"""`single`: one worker. The baseline, and the numerical reference for all the others."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import spec
from paceline.autograd.trained import Trained
from paceline.collectives.context import Context


class SingleArchitecture:
    """Nobody to agree with."""

    def __init__(self, options: spec.Single, context: Context) -> None:
        self._trained: Trained | None = None

    def distribute(self, trained: Trained) -> None:
        self._trained = trained

    def take(self, optimizer: Optimizer) -> None:
        pass

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        assert self._trained is not None
        return torch.nn.utils.clip_grad_norm_(self._trained.tensors, max_norm)

    def settle(self) -> None:
        pass

    def counters(self) -> dict[str, object]:
        return {}

    def close(self, *, failed: bool) -> None:
        pass
