"""An emulated accelerator: a model with real parameters whose layers take profiled time.

Each layer sleeps until its profiled time has passed, without using the CPU, and backward yields
gradients of the real size at the moment the device would. From the outside it is an ordinary module
(same parameters, same names, same hooks), so every architecture runs on it unchanged. Nothing is
computed: gradients are zeros, the loss means nothing, updates are skipped. The network's side of a
run is real; the arithmetic's is the profile's.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import models, spec
from paceline.spec.hosts import host_of
from paceline.spec.profile import REAL_DEVICE, DeviceProfile, Layer, find_profile

_SHORTEST_SLEEP_SECONDS = 0.3e-3
"""Layers shorter than this are slept through together: waking up costs CPU that others need."""

_NOTICED_WAIT_SECONDS = 1e-3
"""A layer's hooks that take this long were waiting for weights, and the device with them."""


class Pace:
    """The device's own clock: when its next layer ends.

    Layers follow one another on an absolute schedule, so that late wake-ups do not add up. The
    schedule moves only where the device itself would have waited: for a batch, or for weights.
    """

    def __init__(
        self,
        *,
        slowdown: float = 1.0,
        jitter_fraction: float = 0.0,
        seed: int = 0,
        events: Callable[[int], tuple[float, float]] = lambda passes: (1.0, 0.0),
    ) -> None:
        """`events`: for the n-th pass, a further slowdown and a pause in seconds before it."""
        self._slowdown, self._jitter_fraction = slowdown, jitter_fraction
        self._random, self._events = random.Random(seed), events
        self._until, self._factor = 0.0, slowdown
        self.passes = 0
        """Number of passes so far; a run that resumes from a checkpoint counts those before it."""

    def begin(self) -> None:
        """A batch arrived: the next pass starts now, or after a pause that is due."""
        factor, pause_seconds = self._events(self.passes)
        self.passes += 1
        self._factor = self._slowdown * factor
        self._until = max(self._until, time.monotonic()) + pause_seconds

    def wait_for_weights(self) -> None:
        """Weights came late: the device stood still until now."""
        self._until = max(self._until, time.monotonic())

    def spend(self, seconds: float, *, last: bool) -> None:
        """Let one layer's time pass; the last layer of a pass returns exactly when it is over."""
        jitter = 1.0
        if self._jitter_fraction:
            jitter = max(0.0, self._random.gauss(1.0, self._jitter_fraction))
        self._until += seconds * self._factor * jitter
        ahead = self._until - time.monotonic()
        if ahead > (0.0 if last else _SHORTEST_SLEEP_SECONDS):
            time.sleep(ahead)


class EmulatedLayer(nn.Module):
    """Stands where a layer with parameters stood, and owns parameters of the same names."""

    def __init__(self, original: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        for name, parameter in original.named_parameters(recurse=False):
            trains = parameter.requires_grad
            self.register_parameter(name, nn.Parameter(make(parameter), requires_grad=trains))
        for name, buffer in original.named_buffers(recurse=False):
            self.register_buffer(name, make(buffer))
        self.profile: Layer | None = None
        self.pace: Pace | None = None
        self.first = self.last = False
        self.gradients: list[Tensor] = []
        self._entered = 0.0

    def __call__(self, *inputs: Any) -> Any:
        self._entered = time.monotonic()
        return super().__call__(*inputs)

    def forward(self, signal: Tensor, scale: float) -> Tensor:
        assert self.pace is not None
        own = list(self.parameters(recurse=False))
        for parameter in own:
            parameter.detach()  # a torch function of each: served weights are waited for here
        if time.monotonic() - self._entered > _NOTICED_WAIT_SECONDS:
            self.pace.wait_for_weights()
        passed: Tensor = _TimedLayer.apply(signal, self, scale, *own)  # type: ignore[no-untyped-call]
        return passed


class _TimedLayer(torch.autograd.Function):
    """Passes a signal on, one layer's time later; backward adds the layer's gradients."""

    @staticmethod
    def forward(
        ctx: Any, signal: Tensor, layer: EmulatedLayer, scale: float, *own: Tensor
    ) -> Tensor:
        ctx.layer, ctx.scale = layer, scale
        assert layer.pace is not None
        assert layer.profile is not None
        layer.pace.spend(layer.profile.forward_seconds * scale, last=layer.last)
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Any, ...]:
        layer: EmulatedLayer = ctx.layer
        assert layer.pace is not None
        assert layer.profile is not None
        layer.pace.spend(layer.profile.backward_seconds * ctx.scale, last=layer.first)
        # A new view each time: autograd takes it as the gradient without copying it.
        return signal, None, None, *(gradient.detach() for gradient in layer.gradients)


class EmulatedModel(nn.Module):
    """The model of `profile` on an emulated device; `state_dict` has the real model's keys."""

    def __init__(self, profile: DeviceProfile, pace: Pace) -> None:
        super().__init__()
        with torch.device("meta"):
            original = models.build(profile.model, input_shape=profile.input_shape)
        shared: dict[int, Tensor] = {}

        def make(tensor: Tensor) -> Tensor:
            return shared.setdefault(id(tensor), _zeros(tensor.shape, tensor.dtype))

        found: dict[str, EmulatedLayer] = {}
        for name, child in original.named_children():
            self.add_module(name, _emulated(child, name, make, found))
        missing = [layer.name for layer in profile.layers if layer.name not in found]
        assert not missing, f"profile of {profile.model} names layers it does not have: {missing}"
        self._profile, self.pace = profile, pace
        self._order = [found[layer.name] for layer in profile.layers]
        for layer, times in zip(self._order, profile.layers, strict=True):
            layer.profile, layer.pace = times, pace
        self._order[0].first = self._order[-1].last = True
        self._share_gradients()
        info = models.info(profile.model)
        self._num_classes = info.num_classes if info is not None else 2

    def forward(self, inputs: Tensor) -> Tensor:
        self.pace.begin()
        scale = self._profile.scale_for(inputs.shape[0])
        signal = torch.zeros(1)
        for layer in self._order:
            signal = layer(signal, scale)
        return signal.expand(inputs.shape[0], self._num_classes)

    def _share_gradients(self) -> None:
        """Let all gradients share one buffer of zeros: none needs memory of its own."""
        own = [list(layer.parameters(recurse=False)) for layer in self._order]
        longest = max(p.numel() for parameters in own for p in parameters)
        zeros = _zeros(torch.Size([longest]), torch.float32)
        for layer, parameters in zip(self._order, own, strict=True):
            layer.gradients = [zeros[: p.numel()].view(p.shape) for p in parameters]


def skip_updates(optimizer: Optimizer) -> None:
    """Let an optimizer that would update on this worker do nothing: the device would, not the CPU.

    One that only asks servers to update goes on doing so: it is torch's by name alone.
    """
    kind = type(optimizer)
    # Of a class that was mixed into, only the method says whose it is: the class keeps its module.
    if kind.step.__module__.startswith("torch.optim."):
        skipping: Any = optimizer
        skipping.__class__ = type(kind.__name__, (kind,), {"step": _no_step})
        skipping._patch_step_function()  # hooks around `step` belong to the class


def _no_step(self: Optimizer, closure: Any = None) -> None:
    """Nothing: the gradients of an emulated device are zeros."""


def model_for(experiment: spec.Experiment, member: str) -> EmulatedModel | None:
    """The emulated model of a worker; None where it computes on a real device."""
    if experiment.engine != "tunnel":
        return None
    host = host_of(experiment, member)
    if host.device == REAL_DEVICE:
        return None
    workload, dilation = experiment.workload, experiment.cluster.dilation
    profile = find_profile(host.device, workload.model, workload.precision)
    own = [fault for fault in experiment.faults if fault.member == member]

    def events(passes: int) -> tuple[float, float]:
        """Return how much slower the device is from this step on, and the pause before it."""
        step, again = divmod(passes, workload.accumulate)
        slow = [f.factor for f in own if f.kind == "slow" and f.at_step <= step]
        pauses = [f.seconds for f in own if f.kind == "pause" and f.at_step == step and not again]
        return (slow[-1] if slow else 1.0), dilation * sum(pauses)

    rank = int(member.removeprefix("worker"))
    pace = Pace(
        slowdown=host.slowdown * dilation,
        jitter_fraction=host.jitter_fraction,
        seed=workload.seed * 1000 + rank,
        events=events,
    )
    return EmulatedModel(profile, pace)


def _zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written to; torch's own touch every page."""
    return torch.from_numpy(np.zeros(tuple(shape), dtype=str(dtype).removeprefix("torch.")))


def _emulated(
    module: nn.Module,
    path: str,
    make: Callable[[Tensor], Tensor],
    found: dict[str, EmulatedLayer],
) -> nn.Module:
    """The same tree, with an EmulatedLayer wherever a module has parameters of its own."""
    copy: nn.Module
    if any(True for _ in module.parameters(recurse=False)):
        copy = found[path] = EmulatedLayer(module, make)
    else:
        copy = nn.Module()
    for name, child in module.named_children():
        copy.add_module(name, _emulated(child, f"{path}.{name}", make, found))
    return copy
