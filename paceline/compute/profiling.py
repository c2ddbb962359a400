"""Per-layer times and operations of a model: what `paceline profile` measures and estimates spread.

A *layer* is a module that owns parameters. Forward time runs from one layer's start to the next
one's, so modules without parameters count with the layer before them; backward time runs from one
layer's last gradient to the next layer's. Both parts add up to the whole pass.

Results are plain tuples, and only torch is needed, so that this runs on a machine that has nothing
else installed.
"""

import platform
import statistics
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

WARMUP_PASSES = 5


class LayerTimes(NamedTuple):
    """Measurements of one layer: the median over the repeats."""

    name: str
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int


class Profile(NamedTuple):
    """Measurements of a model on a device at one batch size."""

    layers: list[LayerTimes]
    overhead_seconds: float
    """Part of a step that a smaller batch does not save."""


class _Moments(Protocol):
    """A way to remember moments of the device's own time."""

    def mark(self) -> object: ...

    def seconds(self, start: object, end: object) -> float: ...


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters(recurse=False) if p.requires_grad]


class FoundLayer(NamedTuple):
    """A module and its own parameters; shared ones belong to the first that has them."""

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]

    @property
    def parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters)


def layers_in_order(model: nn.Module, sample: Tensor) -> list[FoundLayer]:
    """Modules that own parameters, in the order a forward pass of `sample` first enters them."""
    names = {module: name for name, module in model.named_modules() if own_parameters(module)}
    order: list[FoundLayer] = []
    owned: set[nn.Parameter] = set()

    def seen(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        new = [p for p in own_parameters(module) if p not in owned]
        name = names.pop(module, None)
        if name is not None and new:
            owned.update(new)
            order.append(FoundLayer(name, module, new))

    handles = [module.register_forward_pre_hook(seen) for module in list(names)]
    try:
        with torch.no_grad():
            model(sample)
    finally:
        for handle in handles:
            handle.remove()
    return order


def profile(
    model: nn.Module,
    input_shape: tuple[int, ...],
    *,
    batch: int,
    tokens: bool = False,
    num_classes: int,
    channels_last: bool = False,
    autocast: bool = False,
    repeats: int = 15,
    progress: Callable[[int], None] = lambda steps: None,
) -> Profile:
    """Measure `model` where it lies: its layers at `batch`, and a quarter of it for the overhead.

    Hooks slow a step down a little where the host is the limit, so layers are scaled to add up to
    the step as it is without them. `progress` is told how many of `num_passes` are done.
    """
    device = next(model.parameters()).device
    if tokens:
        sample = torch.randint(num_classes, (batch, *input_shape), device=device)
        target = sample
    else:
        sample = torch.randn(batch, *input_shape, device=device)
        target = torch.randint(2, (batch,), device=device)
    if channels_last and sample.ndim == 4:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        sample = sample.contiguous(memory_format=torch.channels_last)
    done = count(1)

    def told() -> None:
        progress(next(done))

    def whole_step(x: Tensor, y: Tensor) -> float:
        return measure_step(model, x, y, autocast=autocast, repeats=repeats, told=told)

    layers = measure_layers(model, sample, target, autocast=autocast, repeats=repeats, told=told)
    whole = whole_step(sample, target)
    scale = whole / sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
    layers = [
        layer._replace(
            forward_seconds=layer.forward_seconds * scale,
            backward_seconds=layer.backward_seconds * scale,
        )
        for layer in layers
    ]
    few = max(1, batch // 4)
    if few == batch:
        return Profile(layers, 0.0)
    small = whole_step(sample[:few], target[:few])
    # t(b) = overhead + b * each, solved for two batches.
    return Profile(layers, max(0.0, (small * batch - whole * few) / (batch - few)))


def num_passes(batch: int, repeats: int) -> int:
    """Return the number of passes that `profile` makes; a batch of one has no quarter."""
    return WARMUP_PASSES + (3 if batch > 1 else 2) * repeats


def describe_device(device_type: str) -> str:
    """The device in words, for the source of a profile."""
    if device_type == "cuda":
        exact = "" if torch.backends.cudnn.allow_tf32 else ", TF32 off"
        return f"one {torch.cuda.get_device_name()}, torch {torch.__version__}{exact}"
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread(s), torch {torch.__version__}"


def processor_name() -> str:
    """The CPU's own name where Linux tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown CPU"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def measure_layers(
    model: nn.Module,
    sample: Tensor,
    target: Tensor,
    *,
    autocast: bool = False,
    warmup: int = WARMUP_PASSES,
    repeats: int = 15,
    told: Callable[[], None] = lambda: None,
) -> list[LayerTimes]:
    """Forward and backward seconds of each layer on the device where `sample` lies."""
    moments: _Moments = CudaMoments() if sample.is_cuda else _HostMoments()
    probe = _Probe(model, sample, moments)
    loss_of = nn.CrossEntropyLoss()

    def one_pass() -> None:
        model.zero_grad(set_to_none=True)
        probe.starts.append(moments.mark())
        with torch.autocast(sample.device.type, torch.bfloat16, enabled=autocast):
            loss = loss_of(model(sample), target)
        probe.turn = moments.mark()
        loss.backward()
        told()

    try:
        times = [probe.times(one_pass) for _ in range(warmup + repeats)][warmup:]
    finally:
        probe.remove()
    medians = [[statistics.median(column) for column in zip(*rows, strict=True)]
               for rows in zip(*times, strict=True)]  # fmt: skip
    return [
        LayerTimes(layer.name, forward, backward, layer.parameter_bytes)
        for layer, (forward, backward) in zip(probe.layers, medians, strict=True)
    ]


def measure_step(
    model: nn.Module,
    sample: Tensor,
    target: Tensor,
    *,
    autocast: bool = False,
    repeats: int = 15,
    told: Callable[[], None] = lambda: None,
) -> float:
    """Median seconds of a whole forward and backward pass, without any hook."""
    moments: _Moments = CudaMoments() if sample.is_cuda else _HostMoments()
    loss_of, taken = nn.CrossEntropyLoss(), []
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        start = moments.mark()
        with torch.autocast(sample.device.type, torch.bfloat16, enabled=autocast):
            loss = loss_of(model(sample), target)
        loss.backward()
        taken.append((start, moments.mark()))
        told()
    return statistics.median(moments.seconds(start, end) for start, end in taken)


class _Probe:
    """Hooks that mark when each layer starts forward and when its last gradient is there."""

    def __init__(self, model: nn.Module, sample: Tensor, moments: _Moments) -> None:
        self._moments = moments
        self.layers = layers_in_order(model, sample)
        self.starts: list[object] = []
        self.turn: object = None
        self._entered: dict[int, object] = {}
        self._ready: dict[int, object] = {}
        self._handles = []
        for index, layer in enumerate(self.layers):
            enter = self._marker(self._entered, index, first=True)
            self._handles.append(layer.module.register_forward_pre_hook(enter))
            for parameter in layer.parameters:
                ready = self._marker(self._ready, index, first=False)
                self._handles.append(_untyped(parameter).register_post_accumulate_grad_hook(ready))

    def _marker(self, into: dict[int, object], index: int, *, first: bool) -> Callable[..., None]:
        def mark(*_: object) -> None:
            if not first or index not in into:
                into[index] = self._moments.mark()

        return mark

    def times(self, one_pass: Callable[[], None]) -> list[tuple[float, float]]:
        """Forward and backward seconds of each layer in one pass."""
        self._entered.clear()
        self._ready.clear()
        self.starts.clear()
        one_pass()
        seconds = self._moments.seconds
        # The first layer also takes what comes before it, the last what comes after it.
        edges = [self.starts[0], *(self._entered[i] for i in range(1, len(self.layers))), self.turn]
        forward = [seconds(a, b) for a, b in pairwise(edges)]
        since_turn = {i: seconds(self.turn, moment) for i, moment in self._ready.items()}
        backward, before = [0.0] * len(self.layers), 0.0
        for index in sorted(since_turn, key=lambda i: since_turn[i]):
            backward[index], before = since_turn[index] - before, since_turn[index]
        return list(zip(forward, backward, strict=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _HostMoments:
    """Moments in CPU time if there is one thread, so that other processes do not count."""

    def __init__(self) -> None:
        alone = torch.get_num_threads() == 1
        self._now = time.process_time if alone else time.perf_counter

    def mark(self) -> object:
        return self._now()

    def seconds(self, start: object, end: object) -> float:
        return float(_untyped(end) - _untyped(start))


class CudaMoments:
    """CUDA events: moments of the stream, whatever the host is doing meanwhile."""

    def mark(self) -> object:
        event = _untyped(torch.cuda).Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: object, end: object) -> float:
        _untyped(end).synchronize()
        return float(_untyped(start).elapsed_time(end)) / 1e3


def _untyped(thing: object) -> Any:
    """Parts of torch have no annotations, in some of its versions."""
    return thing
