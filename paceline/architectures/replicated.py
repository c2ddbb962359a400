"""`replicated`: one process, several devices, each batch split over them (in-graph replication).

Every device has a replica of the model and computes a part of the batch, in a thread of its own (on
GPUs, with a stream of its own). The parts' outputs are put together, so the script computes one
loss of the whole batch, calls backward once and updates one set of weights: it trains like `single`
whatever the sizes of the parts. Replicas in the model's own memory share its weights; to another
GPU they are copied in each pass, and gradients come back the same way. Batch norms see one part
each, and the first replica's statistics count, as worker 0's do in `ring`.
"""

import copy
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from paceline import spec
from paceline.autograd.trained import Trained
from paceline.collectives.context import Context
from paceline.compute.batchwise import batchwise_layers, unlike_single
from paceline.data.sampling import split
from paceline.errors import SpecError

WHERE = "architecture replicated"


class ReplicatedArchitecture:
    """The one worker's side; there are no others."""

    def __init__(self, options: spec.Replicated, context: Context) -> None:
        self._options, self._context = options, context
        self._devices = _devices(options, context)
        count = len(self._devices)
        self._shares = options.share_weights or (1.0,) * count
        if len(self._shares) != count:
            problem = f"{len(self._shares)} shares for {count} devices."
            raise SpecError(WHERE, problem, "give one weight per device, such as shares=3/1.")
        self._streams = [torch.cuda.Stream(d) if d.type == "cuda" else None for d in self._devices]
        threads = max(1, torch.get_num_threads() // count)
        self._pool = ThreadPoolExecutor(
            count, "paceline-replica", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._model: nn.Module | None = None
        self._replicas: list[_Replica] = []
        self._built_from: list[tuple[int, int, bool]] = []

    def distribute(self, trained: Trained) -> None:
        model = trained.model
        if "forward" in vars(model) or model._compiled_call_impl is not None:
            problem = "the model is compiled, and replicas of compiled code cannot be made."
            raise SpecError(WHERE, problem, "leave compile out, or use ring.")
        self._trained, self._model = trained, model
        self._build()
        counts = Counter(str(device) for device in self._devices)
        devices = ", ".join(f"{n} on {one}" if n > 1 else one for one, n in counts.items())
        self._context.note(f"{len(self._devices)} replicas in one process: {devices}.")
        if (layers := batchwise_layers(model)) and len(self._devices) > 1:
            self._context.note(unlike_single(layers, "replica's part of the batch"))

    def take(self, optimizer: Optimizer) -> None:
        pass

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # gradients never leave the process

    def clip(self, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self._trained.tensors, max_norm)

    def settle(self) -> None:
        pass

    def counters(self) -> dict[str, object]:
        return {"replicas": len(self._devices)}

    def close(self, *, failed: bool) -> None:
        if self._model is not None and "forward" in vars(self._model):
            del self._model.forward
        self._pool.shutdown()

    def _build(self) -> None:
        """Make the replicas; again whenever the script has exchanged or frozen a parameter."""
        model = self._model
        assert model is not None
        vars(model).pop("forward", None)  # a copy of the model must not hold this architecture
        self._replicas = [
            _Replica(model, device, stream, first=index == 0)
            for index, (device, stream) in enumerate(zip(self._devices, self._streams, strict=True))
        ]
        self._built_from = _signature(model)
        replaced: Any = model
        replaced.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's own forward: the replicas', on parts of the batch."""
        model = self._model
        assert model is not None
        if not (model.training and torch.is_grad_enabled()):
            return type(model).forward(model, *args, **kwargs)
        if _signature(model) != self._built_from:
            self._build()
        values, shape = pytree.tree_flatten((args, kwargs))
        parts = self._split(values)
        call = _Call(self._pool, shape, parts, self._context.device)
        if self._context.device.type == "cuda":
            outputs = call.joined()
        else:
            if any(isinstance(value, Tensor) and value.requires_grad for value in values):
                problem = "the inputs want gradients themselves."
                raise SpecError(WHERE, problem, "detach them, or use ring.")
            weights = [p for p in model.parameters() if p.requires_grad]
            outputs = _Together.apply(call, *weights)  # type: ignore[no-untyped-call]
        assert call.output_shape is not None
        return pytree.tree_unflatten(list(outputs), call.output_shape)

    def _split(self, values: Sequence[Any]) -> list[tuple["_Replica", list[Any]]]:
        """Each replica that has samples, with its part of every value that has one row a sample."""
        batch = next((len(v) for v in values if isinstance(v, Tensor) and v.ndim), None)
        if batch is None:
            problem = "the model was called without a tensor of samples."
            raise SpecError(WHERE, problem, "pass the batch as a tensor, samples first.")
        slices = split(batch, self._shares)
        return [
            (replica, [_part(value, part, batch) for value in values])
            for replica, part in zip(self._replicas, slices, strict=True)
            if part.stop > part.start
        ]


class _Replica:
    """The model on one device, with parameters of its own that share memory where they can."""

    def __init__(self, model: nn.Module, device: torch.device, stream: Any, *, first: bool) -> None:
        self.device, self.stream = device, stream
        self._original = model
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            here = parameter.detach().to(device)  # the same memory, or a copy elsewhere
            memo[id(parameter)] = nn.Parameter(here, parameter.requires_grad)
        if first:
            memo |= {id(buffer): buffer for buffer in model.buffers()}
        for module in model.modules():  # hooks are the script's: shared, never copied
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                memo |= {id(hook): hook for hook in hooks.values()}
        self.module = copy.deepcopy(model, memo)
        for hooks in (self.module._forward_hooks, self.module._forward_pre_hooks):
            hooks.clear()  # the model's own run around all replicas
        if not first:
            for name, buffer in self.module.named_buffers():
                owner = self.module.get_submodule(name.rpartition(".")[0])
                owner._buffers[name.rpartition(".")[2]] = buffer.to(device)
        self.weights = [p for p in self.module.parameters() if p.requires_grad]
        self._buffers = [
            (mine, theirs)
            for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True)
            if mine.data_ptr() != theirs.data_ptr()
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the model's buffers and modes, as they are now."""
        for mine, theirs in self._buffers:
            mine.copy_(theirs, non_blocking=True)
        for module, original in zip(self.module.modules(), self._original.modules(), strict=True):
            module.training = original.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """On a GPU with the model's own weights, brought here in a way that autograd follows."""
        if self.device.type != "cuda":
            return self.module(*args, **kwargs)
        weights = {
            name: parameter.to(self.device, non_blocking=True)
            for name, parameter in self._original.named_parameters()
        }
        return torch.func.functional_call(self.module, weights, args, kwargs)


class _Call:
    """One pass over all replicas: what forward leaves for backward."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        shape: pytree.TreeSpec,
        parts: list[tuple[_Replica, list[Any]]],
        device: torch.device,
    ) -> None:
        self._pool, self._shape, self._parts, self._device = pool, shape, parts, device
        self._outputs: list[list[Tensor]] = []
        self.output_shape: pytree.TreeSpec | None = None
        kind = device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def forward(self) -> tuple[Tensor, ...]:
        """For `_Together`: the outputs of `joined`, as numbers; backward is ours."""
        outputs = self.joined(detached=True)
        assert self.output_shape is not None
        return outputs

    def joined(self, *, detached: bool = False) -> tuple[Tensor, ...]:
        """Every replica's outputs, side by side and then end to end.

        Between GPUs autograd follows: it has a thread for each device already, and one of them is
        not to wait for the others inside an operation.
        """
        for replica, _ in self._parts:
            replica.refresh()
        results = self._in_threads(self._forward_part)
        shapes = [shape for _, shape in results]
        self._outputs, self.output_shape = [outputs for outputs, _ in results], shapes[0]
        sizes = [_num_samples(values) for _, values in self._parts]
        for outputs, size in zip(self._outputs, sizes, strict=True):
            for output in outputs:
                if not isinstance(output, Tensor) or not output.ndim or len(output) != size:
                    problem = "the model returns something else than one row for each sample."
                    fix = "return the outputs and compute the loss of them, or use ring."
                    raise SpecError(WHERE, problem, fix)
        return tuple(
            torch.cat([_brought(o.detach() if detached else o, self._device) for o in same])
            for same in zip(*self._outputs, strict=True)
        )

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient of every weight: the replicas' parts of it, added up."""
        starts = [0] * len(gradients)
        cut: list[list[Tensor | None]] = []
        for outputs in self._outputs:
            own: list[Tensor | None] = []
            for place, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
                stop = starts[place] + len(output)
                own.append(None if gradient is None else gradient[starts[place] : stop])
                starts[place] = stop
            cut.append(own)
        parts = self._in_threads(lambda index: self._backward_part(index, cut[index]))
        self._outputs = []
        return [_added(same, self._device) for same in zip(*parts, strict=True)]

    def _forward_part(self, index: int) -> tuple[list[Tensor], pytree.TreeSpec]:
        replica, values = self._parts[index]
        kind, dtype, enabled = self._autocast
        moved = [v.to(replica.device) if isinstance(v, Tensor) else v for v in values]
        args, kwargs = pytree.tree_unflatten(moved, self._shape)
        # No cache of rounded weights: one replica's may not be there yet on another's stream.
        rounding = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
        with torch.enable_grad(), rounding:
            return pytree.tree_flatten(replica.forward(*args, **kwargs))

    def _backward_part(
        self, index: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        replica, _ = self._parts[index]
        pairs = [
            (output, gradient.to(replica.device))
            for output, gradient in zip(self._outputs[index], gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if not pairs or not replica.weights:
            return (None,) * len(replica.weights)
        outputs, wanted = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, replica.weights, wanted, allow_unused=True)

    def _in_threads(self, work: Any) -> list[Any]:
        """Call `work(index)` for all parts at once; the device's own order of things is kept."""
        main = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def one(index: int) -> Any:
            stream = self._parts[index][0].stream
            with ExitStack() as stack:
                if stream is not None:
                    stack.enter_context(torch.cuda.device(stream.device))
                    stack.enter_context(torch.cuda.stream(stream))
                    stream.wait_stream(main)
                return work(index)

        results = list(self._pool.map(one, range(len(self._parts))))
        if main is not None:
            for replica, _ in self._parts:
                main.wait_stream(replica.stream)
            for tensor in pytree.tree_leaves(results):
                if isinstance(tensor, Tensor) and tensor.device == self._device:
                    tensor.record_stream(main)
        return results


class _Together(torch.autograd.Function):
    """All replicas as one operation, so that backward runs them side by side on CPUs too."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.call.backward(gradients))


def _devices(options: spec.Replicated, context: Context) -> list[torch.device]:
    """Where the replicas are: the model's device first; several share one where there are few."""
    if context.device.type != "cuda":
        return [context.device] * (options.devices or len(os.sched_getaffinity(0)))
    there = torch.cuda.device_count()
    first = context.device.index or 0
    return [
        torch.device("cuda", (first + index) % there) for index in range(options.devices or there)
    ]


def _signature(model: nn.Module) -> list[tuple[int, int, bool]]:
    return [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()]


def _part(value: Any, part: slice, batch: int) -> Any:
    shared = not isinstance(value, Tensor) or not value.ndim or len(value) != batch
    return value if shared else value[part]


def _num_samples(values: Sequence[Any]) -> int:
    return next(len(value) for value in values if isinstance(value, Tensor) and value.ndim)


def _brought(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)


def _added(parts: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    there = [_brought(part, device) for part in parts if part is not None]
    if not there:
        return None
    total = there[0]
    for part in there[1:]:
        total = total + part  # not in place: a gradient may be one number, shown many times
    return total
