"""`single`: one worker. The baseline, and the numerical reference for all the others."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.optim import Optimizer

from paceline import spec
from paceline.architectures.base import Context


class SingleArchitecture:
    """Nobody to agree with."""

    def __init__(self, options: spec.Single, context: Context) -> None:
        self._model: torch.nn.Module | None = None

    def distribute(
        self, model: torch.nn.Module, optimizer: Optimizer
    ) -> tuple[torch.nn.Module, Optimizer]:
        self._model = model
        return model, optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clip(self, max_norm: float) -> None:
        assert self._model is not None
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def settle(self) -> None:
        pass

    def counters(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass
