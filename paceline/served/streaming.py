"""Gradients that leave as they are made, while servers hold the weights: both kinds of server.

From one `optimizer.step()` to the next: the first gradient of a backward pass sends the settings of
the optimizer ahead, each gradient leaves and a stand-in takes its place, and `step` closes it.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.autograd.gradients import is_held
from paceline.collectives.context import Context
from paceline.errors import ExchangeError, SpecError
from paceline.protocol.messages import Settings
from paceline.served.client import Moment
from paceline.served.cutting import Cutter, Stretch
from paceline.served.exchange import Exchange
from paceline.served.optimizer_state import pull_state, push_state
from paceline.served.updates import settings_of
from paceline.served.weights import HeldGradient, Owner, ServedWeights, make_remote

Recorded = tuple[Sequence[tuple[Tensor, Tensor]], Moment]
"""Tensors with the memory their gradients are made in, and when the last of them is made."""


class Replay(NamedTuple):
    """What recorded passes make in each step."""

    indices: Sequence[int]
    """The tensors that get a gradient."""

    stretches: Sequence[Stretch]


class Streaming:
    """One exchange whose weights and optimizer are with the servers."""

    def __init__(
        self,
        exchange: Exchange,
        context: Context,
        optimizer: Optimizer,
        owner: Owner,
        *,
        holds: bool,
        way_out: str,
        before_write: Callable[[], None],
    ) -> None:
        """`holds`: servers wait for `step`. `way_out`: what to do for a script that needs more.
        `before_write` is called before the script writes to its weights, and refuses that."""
        self._exchange, self._context, self._optimizer = exchange, context, optimizer
        self._worker, self.tensors = exchange.worker, exchange.exchanged.tensors
        self._cutter = Cutter(
            exchange.exchanged.names,
            self.tensors,
            exchange.layout,
            self._worker,
            context.training.weight,
        )
        self._holds, self._way_out = holds, way_out
        self._settles = False
        """Weights are waited for at once: they are read where nobody sees it."""
        self.steps = self._worker.machine.step
        self._sent_settings: list[Settings] = []
        self._scales: dict[int, float] = {}
        """What clipping multiplies each tensor's gradient by, in this step."""
        self._norms: list[float] | None = None
        """Of each tensor's averaged gradient in this step, once asked for."""
        self.weights = ServedWeights(
            self.tensors, before_read=self._read, before_write=before_write
        )
        self._stand_ins = [
            HeldGradient(tensor, partial(self._norm, i), partial(self._scale_by, i), way_out)
            for i, tensor in enumerate(self.tensors)
        ]
        self._learned_order = False
        if optimizer.state and exchange.leads:
            push_state(optimizer, self.tensors, exchange.layout, self._worker)
        exchange.fill()
        self.weights.install([exchange.view(index) for index in range(len(self.tensors))])
        self._owner = owner
        self._send_away_optimizer()

    def saved_state(self) -> dict[str, Any]:
        self.settle()
        with self._local_optimizer() as optimizer:
            pull_state(optimizer, self.tensors, self._exchange.layout, self._worker)
            return optimizer.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Servers take a saved state, worker 0's."""
        self.settle()
        with self._local_optimizer() as optimizer:
            optimizer.load_state_dict(state)
            if self._exchange.leads:
                push_state(optimizer, self.tensors, self._exchange.layout, self._worker)

    @contextmanager
    def _local_optimizer(self) -> Iterator[Optimizer]:
        """The optimizer as the script made it, for a moment."""
        self._restore()
        try:
            yield self._optimizer
        finally:
            self._send_away_optimizer()

    def _send_away_optimizer(self) -> None:
        for tensor in self.tensors:  # state of tensors that are frozen now stays
            self._optimizer.state.pop(tensor, None)
        self._restore = make_remote(self._optimizer, self._owner)

    def settle(self) -> None:
        self._waited(self._worker.wait_all())

    # Life of one step.

    @property
    def has_begun(self) -> bool:
        """Some gradients of this step have left."""
        return bool(self._cutter.made)

    def begin(self) -> None:
        """Settings must reach the servers before the gradients they are for."""
        self._worker.wait_all()  # a weight that nobody read may still be on its way
        if not self._learned_order and len(self.weights.order) > 1:
            self._learn_order()
        self._send_settings()

    def send(self) -> None:
        """`optimizer.step()` where gradients leave only now: the script keeps its own."""
        self.begin()
        for index, tensor in enumerate(self.tensors):
            if tensor.grad is not None:
                self._cutter.take(index, tensor.grad.detach().as_subclass(Tensor).clone())
        self._cutter.finish()
        self._close()

    def take(self, index: int) -> None:
        """The gradient of a tensor is made."""
        tensor = self.tensors[index]
        if index in self._cutter.made:
            raise ExchangeError(
                f"{self._exchange.exchanged.names[index]} got a second gradient before "
                "optimizer.step(): run all but the last backward of a step inside "
                f"paceline.no_sync(). If the step was skipped on purpose: {self._way_out}"
            )
        if is_held(tensor, surely=True):
            raise ExchangeError(
                f"the script keeps the gradient of {self._exchange.exchanged.names[index]}, or "
                f"memory that it lies in, and it goes to the servers. {self._way_out}"
            )
        if not self._cutter.made:
            self.begin()
        gradient, tensor.grad = tensor.grad, self._stand_ins[index]
        assert gradient is not None
        self._cutter.take(index, gradient, hold=self._holds)

    def refuse_broken_pass(self, error: Exception, way_out: str) -> None:
        """A backward pass was ended by an exception: what has left counts, wherever it got to."""
        if self.has_begun:
            raise ExchangeError(
                f"backward() raised {type(error).__name__} when some of its gradients had gone to "
                f"the servers, which cannot be undone. {way_out}"
            )

    def record(self, recorded: Sequence[Recorded]) -> "Replay | None":
        """Prepare for gradients that recorded passes make in each step; None where it cannot be."""
        number = {id(tensor): index for index, tensor in enumerate(self.tensors)}
        made = [
            ([(number[id(tensor)], gradient) for tensor, gradient in pairs], moment)
            for pairs, moment in recorded
        ]
        stretches = self._cutter.cut(made, hold=self._holds)
        if stretches is None:
            return None
        indices = [index for gradients, _ in made for index, _ in gradients]
        for index in indices:
            self.tensors[index].grad = self._stand_ins[index]
        return Replay(indices, stretches)

    def replay(self, replay: "Replay") -> None:
        """Recorded passes are on their way through the device: all gradients of a step."""
        self.begin()
        self._cutter.replay(replay.indices, replay.stretches)

    def step(self) -> None:
        """`optimizer.step()`: all gradients are made."""
        with torch._C.DisableTorchFunctionSubclass():
            self._check_gradients()
            for index, tensor in enumerate(self.tensors):
                left = tensor.grad is not None and tensor.grad is not self._stand_ins[index]
                if left:  # what no_sync gathered, or the script put there
                    self.take(index)
        if self._norms is None:  # else the norm that was asked for has closed it
            if not self._cutter.made:
                self.begin()
            self._cutter.finish(hold=self._holds)
        if self._holds:
            self._send_settings()
            self._worker.commit(self._common_scale())
        elif settings_of(self._optimizer) != self._sent_settings:
            problem = "a setting of the optimizer changed between backward and step."
            fix = f"change it before backward or after the step, as schedulers do. {self._way_out}"
            raise SpecError("optimizer", problem, fix)
        self._close()

    def _close(self) -> None:
        self._norms, self.steps = None, self.steps + 1
        self._scales.clear()
        self._exchange.greet(self.steps)
        if self._settles or _has_compiled_code():  # it cannot stop where it needs a weight
            self.settle()

    def _check_gradients(self) -> None:
        """What has left must still be what the script wants to step with."""
        made = self._cutter.made
        held = [t.grad is self._stand_ins[i] for i, t in enumerate(self.tensors)]
        if any(not held[index] for index in made):
            raise ExchangeError(
                "gradients were cleared or replaced between backward and optimizer.step(), and "
                f"have gone to the servers. {self._way_out}"
            )
        if not made and self._norms is None and any(held):
            raise ExchangeError(
                "optimizer.step() was called again without new gradients, which have gone to the "
                f"servers. {self._way_out}"
            )

    def _send_settings(self) -> None:
        settings = settings_of(self._optimizer)
        if settings != self._sent_settings:
            self._sent_settings = settings
            self._worker.configure(settings)

    def _learn_order(self) -> None:
        """Tell the exchange in which order a forward pass used the weights; the rest come first."""
        unseen = [i for i in range(len(self.tensors)) if i not in self.weights.order]
        order = {index: place for place, index in enumerate([*unseen, *self.weights.order])}
        chunks = self._exchange.layout.chunks
        self._worker.reorder([min(order[i] for i in chunk.parameters) for chunk in chunks])
        self._learned_order = True

    def _read(self, index: int) -> None:
        """A tensor is about to be read."""
        self._settles = self._settles or torch._C._get_tracing_state() is not None
        if self.has_begun or self._norms is not None:
            self._read_before_step(index)
            return
        if not self._worker.idle:
            self._waited(self._worker.wait(self._cutter.chunks_of(index)))

    def _read_before_step(self, index: int) -> None:
        """Where servers hold the step, or lack a part of the tensor's gradient, its weights are the
        old ones, whole; else they may be new before `optimizer.step()` is called."""
        if not self._holds and self._cutter.has_submitted(index):
            raise ExchangeError(
                "weights are read between backward and optimizer.step(), when some are new and "
                "some old: run all but the last backward of a step inside paceline.no_sync(), and "
                f"look at weights after the step. {self._way_out}"
            )

    # Clipping.

    def _norm(self, index: int) -> float:
        """A tensor's `grad` is asked for its norm: the step is complete, and on hold."""
        if not self._holds:
            problem = "used before optimizer.step(), and gone to the servers already."
            raise SpecError("gradients", problem, self._way_out)
        if self._norms is None:
            self._cutter.finish(hold=True)
            squared_norms, seconds = self._worker.squared_norms(self.steps)
            self._norms = [math.sqrt(squared) for squared in squared_norms]
            self._waited(seconds)
        return self._norms[index]

    def _scale_by(self, index: int, factor: float) -> None:
        if not self._holds:
            self._norm(index)
        self._scales[index] = self._scales.get(index, 1.0) * factor

    def _common_scale(self) -> float:
        factors = set(self._scales.values()) or {1.0}
        if len(factors) > 1:
            problem = "parameters were clipped apart, by different factors."
            raise SpecError("clip_grad_norm_", problem, f"clip all together. {self._way_out}")
        return factors.pop()

    def _waited(self, seconds: float) -> None:
        if seconds > 0:
            self._context.clock.charge("exchange_exposed", seconds)


def push_weights(exchange: Exchange) -> None:
    """Worker 0's weights, as they lie in the exchange's memory, become the servers'."""
    for chunk in range(len(exchange.layout.chunks)) if exchange.leads else ():
        exchange.worker.assign(chunk, exchange.held.chunk(chunk))


def _has_compiled_code() -> bool:
    """Whether torch.compile or torch.jit has been at work in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    scripted = sys.modules.get("torch.jit._recursive")
    return (dynamo is not None and bool(dynamo.counters["frames"])) or (
        scripted is not None and bool(scripted.concrete_type_store.type_store)
    )
