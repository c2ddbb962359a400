"""`server`, seen from one worker: sets up its sides, then hooks them into the model."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import spec
from paceline.architectures.base import Context
from paceline.architectures.server import control, setup
from paceline.architectures.server.held import HeldGradient
from paceline.architectures.server.hooks import Backward, Forward
from paceline.architectures.server.memory import as_run
from paceline.architectures.server.optimizer import make_remote
from paceline.architectures.server.plan import placement_of, trained_parameters
from paceline.architectures.server.updates import is_elementwise_state, settings_of
from paceline.errors import SpecError

CLOSING_SECONDS = 5.0
"""How long a worker that failed goes on serving the others."""


class ServerArchitecture:
    """Workers push gradient chunks; servers update and return weights."""

    def __init__(self, options: spec.Server, context: Context) -> None:
        setup.check(options, context.identity)
        self._options, self._context = options, context
        self._member: setup.WorkerMember | None = None
        self._undo: list[Any] = []
        self._steps = 0
        self._sent_settings: list[control.Settings] = []
        self._holds = options.update == "server" and setup.is_exclusive(options)
        """The first step is held until `optimizer.step()`: it shows whether this script clips
        gradients or changes settings between backward and step. If it does, all steps are."""
        self._touched = False
        self._scales: dict[int, float] = {}
        """What clipping multiplies each parameter's gradient by, in this step."""
        self._norms: list[float] | None = None
        """Of each parameter's averaged gradient in this step, once asked for."""

    def distribute(
        self, model: torch.nn.Module, optimizer: Optimizer
    ) -> tuple[torch.nn.Module, Optimizer]:
        self._model, self._optimizer = model, optimizer
        self._named = trained_parameters(model)
        if placement_of(self._options, self._context.identity) != self._options.placement:
            self._context.note("no servers were asked for: the workers serve (colocated).")
        self._member = member = setup.set_up_worker(
            self._options, self._context, model, self._named, optimizer
        )
        self._worker, self._layout = member.worker, member.plan.layout
        self._sent_settings = member.plan.groups
        self._backward = Backward(self._named, self._layout, self._worker)
        self._backward.hold = self._holds
        self._backward.before_first = self._before_first_gradient
        self._undo.append(self._backward.remove)
        model.register_state_dict_pre_hook(lambda *_: self.settle())
        if self._options.update == "server":
            self._hook_for_server_updates()
        return model, optimizer

    def _hook_for_server_updates(self) -> None:
        model, optimizer = self._model, self._optimizer
        self._backward.stand_ins = [
            HeldGradient(parameter, partial(self._norm, index), partial(self._scale_by, index))
            for index, (_, parameter) in enumerate(self._named)
        ]
        forward = Forward(
            model, self._named, self._layout, self._worker, self._backward, self._waited
        )
        self._undo.append(forward.remove)
        model.register_load_state_dict_pre_hook(lambda *_: self.settle())
        model.register_load_state_dict_post_hook(lambda *_: self._push_loaded_weights())
        if optimizer.state:
            self._push_loaded_state()
            optimizer.state.clear()
        self._undo.append(
            make_remote(
                optimizer,
                on_step=self._step,
                on_state_wanted=self._pull_state,
                on_state_given=self._push_loaded_state,
            )
        )

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        before, self._backward.synchronizes = self._backward.synchronizes, False
        try:
            yield
        finally:
            self._backward.synchronizes = before

    def no_sync(self) -> AbstractContextManager[None]:
        return self._accumulating()

    def clip(self, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_([p for _, p in self._named], max_norm)

    def _norm(self, index: int) -> float:
        """A parameter's `grad` is asked for its norm: the step is complete, and held."""
        if not self._holds:
            problem = "the gradients of this step are already with the servers."
            if not setup.is_exclusive(self._options):
                fix = "write server:update=worker, or mode=sync: other modes have no whole step."
            else:
                fix = "clip in the first step too (with a large bound): it tells us to wait for it."
            raise SpecError("clip_grad_norm_", problem, fix)
        self._touched = True
        if self._norms is None:
            self._backward.finish()
            began = time.monotonic()
            self._norms = [
                math.sqrt(squared) for squared in self._worker.squared_norms(self._steps)
            ]
            self._waited(time.monotonic() - began)
        return self._norms[index]

    def _scale_by(self, index: int, factor: float) -> None:
        self._scales[index] = self._scales.get(index, 1.0) * factor

    def settle(self) -> None:
        if self._member is not None:
            self._worker.wait_all()

    def counters(self) -> dict[str, object]:
        return self._member.counters() if self._member is not None else {}

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self._member is not None:
            failed = self._worker.failure is not None or getattr(sys, "last_value", None)
            self._member.close(CLOSING_SECONDS if failed else self._context.deadline_seconds)
            self._member = None

    # Life of one step.

    def _before_first_gradient(self) -> None:
        """Settings must reach the servers before the gradients they are for."""
        if self._options.update == "worker":
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_of_backward)
            return
        self._worker.wait_all()  # a weight no forward used may still be on its way
        self._send_settings()

    def _send_settings(self) -> bool:
        settings = settings_of(self._optimizer)
        if settings == self._sent_settings:
            return False
        self._sent_settings = settings
        self._worker.send_to_all(control.Hyper(self._context.identity.rank, settings))
        return True

    def _step(self) -> None:
        """`optimizer.step()` with `update = "server"`: all gradients are made."""
        if self._norms is None:
            self._backward.finish()
        self._backward.clear()
        if self._holds:
            if self._send_settings():
                self._touched = True
            self._worker.commit(self._steps, self._common_scale())
            if self._steps == 0 and not self._touched:
                self._holds = self._backward.hold = False
        elif settings_of(self._optimizer) != self._sent_settings:
            problem = "a setting of the optimizer changed between backward and step."
            fix = "change it before backward, or after optimizer.step() as schedulers do."
            raise SpecError("optimizer", problem, fix)
        self._norms, self._steps = None, self._steps + 1
        self._scales.clear()

    def _common_scale(self) -> float:
        factors = set(self._scales.values()) or {1.0}
        if len(factors) > 1:
            problem = "parameters were clipped apart, by different factors."
            fix = "clip all together, or write server:update=worker."
            raise SpecError("clip_grad_norm_", problem, fix)
        return factors.pop()

    def _end_of_backward(self) -> None:
        """With `update = "worker"`: put the averaged gradients where the optimizer looks."""
        self._backward.finish()
        self._waited(self._worker.wait_all())
        for index, (_, parameter) in enumerate(self._named):
            average = self._member_averages(index, parameter)
            parameter.grad = average
        self._steps += 1

    def _member_averages(self, index: int, parameter: Tensor) -> Tensor:
        assert self._member is not None
        view = self._member.held.parameter(index, parameter)
        return view.clone() if self._member.plan.shared else view

    def _waited(self, seconds: float) -> None:
        if seconds > 0:
            self._context.clock.charge("exchange_exposed", seconds)

    # Saving and loading.

    def _push_loaded_weights(self) -> None:
        """`model.load_state_dict` wrote this worker's weights; the servers must have them too."""
        assert self._member is not None
        if self._context.identity.rank == 0:
            for chunk in range(len(self._layout.chunks)):
                self._worker.assign(chunk, self._member.held.chunk(chunk))

    def _pull_state(self) -> None:
        """Gather the optimizer's state from the servers, in the parameters' shapes."""
        self.settle()
        states = self._worker.fetch_states()
        for index, (_, parameter) in enumerate(self._named):
            place = self._layout.places[index]
            merged: dict[str, Any] = {}
            for chunk in (c for c in self._layout.chunks if index in c.parameters):
                tensors, scalars = states[chunk.index]
                start, stop = max(place.start, chunk.start), min(place.stop, chunk.stop)
                for name, values in tensors.items():
                    if name not in merged:
                        merged[name] = torch.zeros_like(parameter)
                    run = as_run(merged[name], parameter)
                    part = values[start - chunk.start : stop - chunk.start]
                    run[start - place.start : stop - place.start] = part
                merged |= {name: torch.tensor(value) for name, value in scalars.items()}
            if merged:
                self._optimizer.state[parameter] = merged

    def _push_loaded_state(self) -> None:
        """Give the servers the state that was loaded into the worker's optimizer."""
        if self._context.identity.rank != 0:
            return
        for chunk in self._layout.chunks:
            tensors: dict[str, Tensor] = {}
            scalars: dict[str, float] = {}
            for index in chunk.parameters:
                _, parameter = self._named[index]
                place = self._layout.places[index]
                start, stop = max(place.start, chunk.start), min(place.stop, chunk.stop)
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    if is_elementwise_state(value, parameter.numel()):
                        whole = tensors.setdefault(name, torch.zeros(chunk.stop - chunk.start))
                        run = as_run(value, parameter)[start - place.start : stop - place.start]
                        whole[start - chunk.start : stop - chunk.start] = run
                    elif value is not None:
                        scalars[name] = float(value)
            if tensors or scalars:
                self._worker.assign_state(chunk.index, tensors, scalars)


def serve(options: spec.Server, context: Context) -> dict[str, object]:
    """The main function of a server member."""
    member = setup.set_up_server(options, context)
    if member is None:
        context.note(f"{context.identity.name} has no share: the workers serve by themselves.")
        return {}
    try:
        member.loop.run(lambda: member.server is not None and member.server.finished)
        return member.counters()
    finally:
        member.close(0.0)
