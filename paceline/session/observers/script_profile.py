"""What prediction needs of somebody's own script, from two of its steps: `paceline run --profile`.

Hooks note when each layer begins its forward pass and when its gradients are there. What is between
the passes (input, the optimizer, whatever else the script does) counts with the first layer, so
that all layers together take what the script's step took. The script ends when enough was seen.
"""

import math
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.compute import profiling
from paceline.compute.profiling import CudaMoments, own_parameters
from paceline.spec.profile import DeviceProfile, Layer, save_profile

VARIABLE = "PACELINE_PROFILE"
"""The file to write; set by `paceline run --profile` for the one worker it starts."""

WARMUP_STEPS, COUNTED_STEPS = 1, 2

Kind = Literal["forward", "turn", "ready", "end"]


class _Mark(NamedTuple):
    kind: Kind
    layer: int
    moment: Any


class _WallMoments:
    """The host's clock: what a script waits for is part of its step."""

    def mark(self) -> object:
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start)


class ScriptProfile:
    """Watches every model that a script distributes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[str] = []
        self._bytes: list[int] = []
        self._order: dict[int, None] = {}
        """Layers as the forward pass first entered them."""
        self._moments: _WallMoments | CudaMoments = _WallMoments()
        self._device = "cpu"
        self._marks: list[_Mark] = []
        self._forward: list[float] = []
        self._backward: list[float] = []
        self._between = 0.0
        self._samples = self._steps = 0
        self._shape: tuple[int, ...] = (1,)

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ
    ) -> "ScriptProfile | None":
        path = environment.get(VARIABLE)
        return cls(Path(path)) if path else None

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Called for each model that is distributed, with the last of its optimizers."""
        prefix = f"model{len(self._names)}." if self._names else ""
        owned: set[nn.Parameter] = set()
        for name, module in model.named_modules():
            new = [parameter for parameter in own_parameters(module) if parameter not in owned]
            if not new:
                continue
            owned.update(new)
            self._add_layer(f"{prefix}{name}", module, new)
        model.register_forward_pre_hook(self._count_samples, with_kwargs=True)
        model.register_forward_hook(self._watch_turn)
        optimizer.register_step_post_hook(self._end_step)
        if any(parameter.is_cuda for parameter in owned):
            self._moments, self._device = CudaMoments(), "cuda"

    def _add_layer(self, name: str, module: nn.Module, own: list[nn.Parameter]) -> None:
        index = len(self._names)
        self._names.append(name)
        self._bytes.append(sum(p.numel() * p.element_size() for p in own))
        self._forward.append(0.0)
        self._backward.append(0.0)

        def entered(module: nn.Module, _: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self._order.setdefault(index)
                self._mark("forward", index)

        module.register_forward_pre_hook(entered)
        ready = partial(self._ready, index)
        for parameter in own:
            parameter.register_post_accumulate_grad_hook(ready)

    def _ready(self, index: int, _: Tensor) -> None:
        self._mark("ready", index)

    def _mark(self, kind: Kind, layer: int = -1) -> None:
        self._marks.append(_Mark(kind, layer, self._moments.mark()))

    def _count_samples(self, model: nn.Module, given: Any, named: Any) -> None:
        first = next(iter(_tensors((given, named))), None)
        if first is None or not (model.training and torch.is_grad_enabled()):
            return
        if self._steps >= WARMUP_STEPS:
            self._samples += first.shape[0] if first.ndim else 1
        self._shape = tuple(first.shape[1:]) or (1,)

    def _watch_turn(self, model: nn.Module, _: Any, output: Any) -> None:
        """The loss has been differentiated when the output's own gradient is there."""
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._mark("turn"))
                return

    def _end_step(self, *_: Any) -> None:
        self._mark("end")
        if self._steps >= WARMUP_STEPS:
            self._add_up()
        self._marks = self._marks[-1:]
        self._steps += 1
        if self._steps == WARMUP_STEPS + COUNTED_STEPS:
            save_profile(self._profile(), self._path)
            raise SystemExit(0)

    def _add_up(self) -> None:
        for before, mark in zip(self._marks, self._marks[1:], strict=False):
            seconds = self._moments.seconds(before.moment, mark.moment)
            if mark.kind == "ready":
                self._backward[mark.layer] += seconds
            elif before.kind == "forward":
                self._forward[before.layer] += seconds
            else:
                self._between += seconds

    def _profile(self) -> DeviceProfile:
        unseen = [index for index in range(len(self._names)) if index not in self._order]
        order = [*self._order, *unseen]
        self._forward[order[0]] += self._between
        layers = tuple(
            Layer(
                name=self._names[index] or "model",
                forward_seconds=self._forward[index] / COUNTED_STEPS,
                backward_seconds=self._backward[index] / COUNTED_STEPS,
                parameter_bytes=self._bytes[index],
            )
            for index in order
        )
        described = profiling.describe_device(self._device)
        return DeviceProfile(
            device=self._device,
            model=Path(sys.argv[0]).stem or "script",
            batch=max(1, math.ceil(self._samples / COUNTED_STEPS)),
            input_shape=self._shape,
            kind="measured",
            source=f"paceline run --profile, {COUNTED_STEPS} steps of a script, {described}",
            layers=layers,
        )


def _tensors(value: Any) -> "list[Tensor]":
    """All tensors in nested arguments, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [found for part in value for found in _tensors(part)]
    return []
