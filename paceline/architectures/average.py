"""`average`: local steps, then weights averaged over the workers, every H steps.

H = 1 with plain SGD is `ring`. An outer optimizer makes it DiLoCo: the way from the last agreed
weights to the workers' mean is a gradient, and Nesterov momentum steps along it. With `overlap` the
sum of one round travels during the local steps of the next, and what it changes is added to the
weights when that round ends: always at the same step, so a run repeats exactly.
"""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline import spec
from paceline.architectures.base import Context
from paceline.architectures.collective import Collective, Flat, connect, flatten, start_equal
from paceline.errors import ExchangeError


class AverageArchitecture:
    """Everybody trains alone for a while; then all take the mean."""

    def __init__(
        self, options: spec.Average, context: Context, collective: Collective | None = None
    ) -> None:
        self._options, self._context = options, context
        self._collective = collective or connect(context, options.backend)
        self._steps = self._rounds = self._exchanged_bytes = 0
        self._is_agreed = True
        self._weights: list[Flat] = []

    def distribute(
        self, model: torch.nn.Module, optimizer: Optimizer
    ) -> tuple[torch.nn.Module, Optimizer]:
        start_equal(self._collective, model)
        trained = [p for p in model.parameters() if p.requires_grad]
        self._model = model
        self._weights = flatten(p.data for p in trained)
        self._buffers = flatten(model.buffers())
        self._state: list[Flat] = []
        self._sent: list[Tensor] | None = None
        self._outer = _Outer(self._options, self._weights)
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        return model, optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # steps exchange, not backward passes

    def clip(self, max_norm: float) -> None:
        """Bounds this worker's own gradient: there is no averaged one."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def settle(self) -> None:
        """A round out of turn where local steps were taken since the last: one model to look at."""
        if not self._is_agreed:
            self._exchange(in_turn=False)

    def counters(self) -> dict[str, object]:
        """Bytes are what a ring all-reduce sends per worker: 2(n-1)/n of what is summed."""
        workers = len(self._collective.members)
        per_byte = 2 * (workers - 1) / workers
        sent = round(self._exchanged_bytes * per_byte)
        by_ring = round(self._steps * sum(w.size_bytes for w in self._weights) * per_byte)
        return {
            "rounds": self._rounds,
            "exchanged_bytes": sent,
            "exchanged_bytes_by_ring": by_ring,
            "saved_bytes": by_ring - sent,
        }

    def close(self) -> None:
        self._collective.close()

    def _before_step(self, *_: Any) -> None:
        if self._steps == 0:
            self._outer.start()

    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        self._is_agreed = False
        if self._steps % self._options.every == 0:
            began = time.monotonic()
            self._exchange(in_turn=True)
            self._context.clock.charge("exchange_exposed", time.monotonic() - began)

    @torch.no_grad()
    def _exchange(self, *, in_turn: bool) -> None:
        """One round. In turn and overlapped, its sum comes back with the next round."""
        alone = len(self._collective.members) == 1 and self._options.outer == "none"
        if alone and self._sent is None:
            self._is_agreed = True  # one's own weights are the mean
            return
        self._correct()
        self._average([*self._buffers, *self._optimizer_state()])
        self._rounds += 1
        if self._options.overlap and in_turn:
            self._sent = [flat.pack().clone() for flat in self._weights]
            self._start(self._weights)
            return
        self._average(self._weights)
        for flat, target in zip(self._weights, self._outer.step(), strict=True):
            flat.unpack(target)
        self._is_agreed = True

    def _correct(self) -> None:
        """Bring in the sum under way: what its mean differs by from what this worker had sent."""
        if self._sent is None:
            return
        self._finish(self._weights)
        for flat, target, sent in zip(self._weights, self._outer.step(), self._sent, strict=True):
            flat.add(target - sent)
        self._sent = None

    def _average(self, flats: Iterable[Flat]) -> None:
        """Replace the tensors by their mean over the workers; the buffers hold it too."""
        flats = list(flats)
        for flat in flats:
            flat.pack()
        self._start(flats)
        self._finish(flats)
        for flat in flats:
            flat.unpack()

    def _start(self, flats: Iterable[Flat]) -> None:
        for flat in flats:
            self._collective.start(flat.buffer)
            self._exchanged_bytes += flat.size_bytes

    def _finish(self, flats: Iterable[Flat]) -> None:
        self._collective.finish()
        for flat in flats:
            flat.buffer.div_(len(self._collective.members))

    def _optimizer_state(self) -> list[Flat]:
        """Momentum and the like, where the user wants them averaged; counters of steps are not."""
        if not self._options.state:
            return []
        tensors = [
            value
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for value in self._optimizer.state[parameter].values()
            if isinstance(value, Tensor) and value.ndim
        ]
        known = [tensor for flat in self._state for tensor in flat.tensors]
        if {id(tensor) for tensor in tensors} != {id(tensor) for tensor in known}:
            self._state = flatten(tensors)  # the first round, or a checkpoint was loaded
            self._check_state()
        return self._state

    def _check_state(self) -> None:
        """A parameter unused by some workers only has state there only; sums would not match."""
        own = float(sum(flat.buffer.numel() for flat in self._state))
        total = torch.tensor([own], dtype=torch.float64, device=self._context.device)
        self._collective.start(total)
        self._collective.finish()
        if float(total) != own * len(self._collective.members):
            problem = "workers' optimizers hold state for different parameters"
            raise ExchangeError(f"{problem}; average without state=true, or use every parameter.")


class _Outer:
    """Where a round's mean leads: to itself, or as far as the outer optimizer goes."""

    def __init__(self, options: spec.Average, weights: list[Flat]) -> None:
        self._options, self._weights = options, weights
        self._agreed: list[Tensor] = []
        self._optimizer: SGD | None = None

    def start(self) -> None:
        """The weights before the first step are agreed on."""
        if self._options.outer == "nesterov":
            self._agreed = [flat.pack().clone() for flat in self._weights]
            self._optimizer = SGD(
                self._agreed,
                lr=self._options.outer_learning_rate,
                momentum=self._options.outer_momentum,
                nesterov=True,
            )

    def step(self) -> list[Tensor]:
        """The weights agreed on; called when the flats' buffers hold the mean."""
        if self._optimizer is None:
            return [flat.buffer for flat in self._weights]
        for agreed, flat in zip(self._agreed, self._weights, strict=True):
            agreed.grad = agreed - flat.buffer
        self._optimizer.step()
        return self._agreed
