"""Where the phases of a step are seen in a script that knows nothing of it.

A step ends when the optimizer that stepped first has stepped. Input is the loader's `next`, forward
begins with the outermost model and ends when backward begins (what lies between is the loss),
backward is `backward()`, and update the optimizer's `step()`.
"""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.autograd.backward import AroundBackward
from paceline.autograd.gradients import uncompiled
from paceline.telemetry import EVALUATION, StepClock
from paceline.telemetry.clock import OTHER

LAST_GRADIENTS = 8
"""Hooks stay on the tensors whose gradients came last; one of them is the last of each step."""

LEARNT_STEPS = 3
"""After so many steps with a hook on every tensor it is known which those are."""


class Listener(Protocol):
    """Who is told what the hooks saw."""

    clock: StepClock

    def found(self, roots: list[torch.nn.Module], optimizer: Optimizer) -> None:
        """The models that the first optimizer trains are known."""

    def backward_begins(self, tensors: Any, gradients: Any) -> None:
        """A backward pass starts from these tensors."""

    def backward_ended(self, began: float, ready: float | None) -> None:
        """A backward pass that began at that moment of the monotonic clock is over."""

    def step_ended(self, optimizer: Optimizer, samples: int) -> None:
        """One step is complete."""


class Hooks:
    """All that is hung into one process; `remove` takes it out again."""

    def __init__(self, listener: Listener, guard: Callable[..., Any]) -> None:
        """`guard` wraps each hook, so that an error of ours never reaches the script."""
        self._to, self._guard = listener, guard
        self._undo: list[Callable[[], None]] = []
        self._thread = 0
        self._main: Optimizer | None = None
        self._updating = self._is_called = self._was_training = False
        self._samples = self._loaded = self._depth = 0
        self._loader: object = None
        self._evaluated: set[int] = set()
        """Iterators of loaders whose batches were not trained on."""
        self._fetched_seconds = 0.0
        self._began: float | None = None
        self._ready: float | None = None
        self._order: dict[int, torch.Tensor] = {}
        self._handles: dict[int, Any] = {}
        self._steps = 0

    def install(self) -> None:
        around = AroundBackward()
        around.before.append(self._guard(self._before_backward))
        around.after.append(self._guard(self._after_backward))
        self._undo.append(around.watch())
        before = register_optimizer_step_pre_hook(uncompiled(self._guard(self._before_update)))
        after = register_optimizer_step_post_hook(uncompiled(self._guard(self._after_update)))
        self._undo += [before.remove, after.remove]
        self._watch_loaders()
        self._watch_saving()

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
        for handle in self._handles.values():
            handle.remove()

    @property
    def is_ours(self) -> bool:
        """Whether this thread is the one that trains; before the first step every thread may be."""
        return self._thread in (0, threading.get_ident())

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Put what `wrap` makes of `owner.name` in its place, until `remove`."""
        original = getattr(owner, name)
        ours = wrap(original)
        setattr(owner, name, ours)

        def undo() -> None:
            if getattr(owner, name) is ours:  # else somebody stands in between, and calls it
                setattr(owner, name, original)

        self._undo.append(undo)

    # The loader.

    def _watch_loaders(self) -> None:
        from torch.utils.data import dataloader

        fetch, fetched = self._guard(self._fetch), self._guard(self._fetched)

        def wrap(original: Any) -> Any:
            def __next__(iterator: Any) -> Any:  # noqa: N807
                if not self.is_ours:
                    return original(iterator)
                began = fetch(iterator)
                batch = None
                try:
                    batch = original(iterator)
                finally:
                    fetched(iterator, began, batch)
                return batch

            return uncompiled(__next__)

        self.replace(dataloader._BaseDataLoaderIter, "__next__", wrap)

    def _fetch(self, iterator: object) -> float:
        evaluates = id(iterator) in self._evaluated
        self._to.clock.enter(EVALUATION if evaluates else "input")
        return time.monotonic()

    def _fetched(self, iterator: object, began: float, batch: Any) -> None:
        self._loader, self._fetched_seconds = iterator, time.monotonic() - began
        if id(iterator) in self._evaluated:
            return
        self._loaded += length_of_first(batch)
        # Of a model that is never called as a whole, what follows the batch is forward.
        blind = not self._is_called and self._steps > 0
        self._to.clock.enter("forward" if blind else OTHER)

    def _watch_saving(self) -> None:
        nested = threading.local()

        def wrap(original: Any) -> Any:
            def save(*given: Any, **named: Any) -> Any:
                clock = self._to.clock
                inside = getattr(nested, "saves", False) or not self.is_ours or not self._steps
                nested.saves = True
                try:
                    with nullcontext() if inside else clock.paused("checkpoint"):
                        return original(*given, **named)
                finally:
                    nested.saves = inside and nested.saves

            return save

        self.replace(torch, "save", wrap)

    # The model.

    def _find_roots(self, optimizer: Optimizer) -> None:
        """The outermost modules that hold what this optimizer updates, and hooks on them."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        holders = [
            found
            for found in gc.get_objects()
            if issubclass(type(found), torch.nn.Module)  # isinstance would wake proxies
            and any(id(parameter) in trained for parameter in found.parameters())
        ]
        inner = {id(c) for holder in holders for c in holder.modules() if c is not holder}
        roots = [holder for holder in holders if id(holder) not in inner]
        for module in roots:
            self._watch_model(module)
            if not _is_wrapper(module):
                continue
            for child in module.children():  # a trainer may call what is inside
                self._watch_model(child)
        self._to.found(roots, optimizer)

    def _watch_model(self, module: torch.nn.Module) -> None:
        if getattr(module, "_compiled_call_impl", None) is not None:
            return  # its hooks would be compiled with it
        begin = uncompiled(self._guard(self._begin_forward))
        end = uncompiled(self._guard(self._end_forward))
        before = module.register_forward_pre_hook(begin, with_kwargs=True)
        after = module.register_forward_hook(end, always_call=True)
        self._undo += [before.remove, after.remove]

    def _begin_forward(self, module: torch.nn.Module, given: Any, named: Any) -> None:
        if not self.is_ours:
            return
        self._depth += 1
        if self._depth > 1:
            return
        clock = self._to.clock
        if module.training and torch.is_grad_enabled():
            self._is_called = True
            self._evaluated.discard(id(self._loader))
            clock.enter("forward")
            self._samples += length_of_first((given, named))
        else:
            self._mark_evaluation()
            clock.enter(EVALUATION)

    def _mark_evaluation(self) -> None:
        if self._loader is not None and id(self._loader) not in self._evaluated:
            self._evaluated.add(id(self._loader))
            self._to.clock.repay("input", EVALUATION, self._fetched_seconds)
        self._loader = None

    def _end_forward(self, *_: Any) -> None:
        if self.is_ours:
            self._depth = max(0, self._depth - 1)

    # Backward and the optimizer.

    def _before_backward(self, tensors: Any, gradients: Any) -> None:
        if not self.is_ours or torch._C._current_graph_task_id() != -1:
            return
        self._to.clock.enter("backward")
        self._began, self._ready = time.monotonic(), None
        self._to.backward_begins(tensors, gradients)

    def _after_backward(self, _: Exception | None) -> None:
        if not self.is_ours:
            return
        self._to.clock.enter("update" if self._updating else OTHER)
        if self._began is not None:
            self._to.backward_ended(self._began, self._ready)
            self._began = None

    @property
    def open_since(self) -> float | None:
        """When the backward pass that goes on now began."""
        return self._began

    def watch_gradients(self, optimizer: Optimizer) -> None:
        """Learn which tensors get their gradients last, and see those from then on."""
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_leaf:
                    see = uncompiled(self._guard(self._gradient))
                    handle = tensor.register_post_accumulate_grad_hook(see)
                    self._handles[id(tensor)] = handle

    def _gradient(self, tensor: Tensor) -> None:
        self._ready = time.monotonic()
        self._to.clock.ready()
        if self._steps < LEARNT_STEPS:
            self._order.pop(id(tensor), None)
            self._order[id(tensor)] = tensor

    def _keep_last_gradients(self) -> None:
        keep = set(list(self._order)[-LAST_GRADIENTS:])
        for number in list(self._handles):
            if number not in keep:
                self._handles.pop(number).remove()
        self._order.clear()

    def _before_update(self, *_: Any) -> None:
        if self.is_ours:
            self._updating = True
            self._to.clock.enter("update")

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.is_ours:
            return
        self._updating = False
        self._to.clock.enter(OTHER)
        if self._main is None:
            self._main, self._thread = optimizer, threading.get_ident()
            self._find_roots(optimizer)
        if optimizer is not self._main:
            return
        samples = self._samples if self._is_called else self._loaded
        self._samples = self._loaded = self._depth = 0
        self._steps += 1
        if self._steps == LEARNT_STEPS:
            self._keep_last_gradients()
        self._to.step_ended(optimizer, samples)


def length_of_first(value: Any, depth: int = 3) -> int:
    """Samples in nested arguments: the length of the first tensor; 0 where there is none."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else 0
    if depth and isinstance(value, dict):
        value = list(value.values())
    if depth and isinstance(value, list | tuple):
        return next((found for part in value if (found := length_of_first(part, depth - 1))), 0)
    return 0


def _is_wrapper(module: torch.nn.Module) -> bool:
    """Whether it holds one module and no parameters of its own, as DDP and compiled modules do."""
    own = next(iter(module.parameters(recurse=False)), None)
    return own is None and len(list(module.children())) == 1
