"""Where an exchange meets autograd: every gradient is seen as it is made, and none is missed.

Hooks on the trained tensors themselves, not on a model's forward pass: it does not matter how a
script calls its model, or whether the loss passes through it at all.
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.collectives.context import Context
from paceline.errors import ExchangeError, PacelineError, SpecError

DIFFERENTIABLE = (
    "create_graph=True makes gradients that can be differentiated, and an exchange cuts them off.",
    "take the inner derivative by torch.autograd.grad(..., create_graph=True).",
)


TWICE = (
    "a tensor of shape {shape} gets one in a backward pass, which leaves, and one more in a pass "
    "inside it.",
    "write checkpoint(..., use_reentrant=False).",
)


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that runs as it stands inside of what a script compiles. Traced, it would be replayed
    as the compiler saw it once: hooks set twice, steps never closed."""
    run: Callable[..., Any] = torch.compiler.disable(hook)
    return run


class Remembered:
    """What is raised inside is not forgotten where the script catches it.

    Without state, so that one serves every gradient of every step."""

    def __init__(self, context: Context) -> None:
        self._broke = context.training.remember

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, PacelineError):
            self._broke(error)


class Sink(Protocol):
    """Who is told of gradients."""

    def made(self, index: int) -> None:
        """The gradient of a tensor is in its `grad`; called inside backward."""

    def pass_over(self) -> None:
        """A backward pass that made gradients outside `no_sync` has ended."""

    def pass_broken(self, error: Exception) -> None:
        """The same, by an exception: a script that catches it finds in `grad` what was made until
        then, as it would alone."""


class GradientTap:
    """Hooks on a list of tensors; told again when the list changes.

    A script may have hooks on its tensors too, and these must find what they would alone: the
    gradient of the whole batch. Such a tensor's gradient is averaged by itself before they run;
    that it is averaged once more with the rest changes nothing.
    """

    def __init__(self, sink: Sink, context: Context, *, averages: bool) -> None:
        """`averages`: not where each worker's gradient is its own."""
        self._sink, self._clock = sink, context.clock
        self._context, self._averages = context, averages
        self._remembered = Remembered(context)
        self._handles: list[RemovableHandle] = []
        self._taps: list[RemovableHandle] = []
        """Those that see gradients: one for each tensor."""
        self._tensors: list[Tensor] = []
        self._insides: dict[Tensor, int] = {}
        """What each tensor consisted of when it was attached (see `renew_hooks`)."""
        self._averaged: set[int] = set()
        """Numbers of the tensors that a hook of the script's finds averaged."""
        self._paused = self._in_pass = False
        self._pass = 0
        """Autograd's number of the pass that is under way."""
        self._made: set[int] = set()
        """What it has made."""
        self._inner: dict[int, None] = {}
        """What passes inside it have made, whose like may make more (reentrant checkpoints that
        share a layer): exchanged when all is over."""
        self._local: dict[int, weakref.ref[Tensor]] = {}
        """Gradients that are this worker's alone, as those of `no_sync`."""
        self._local_versions: dict[int, int] = {}
        """Theirs, when the pass that made them was over."""
        context.training.after_backward(self._returned)

    def attach(self, tensors: Sequence[Tensor]) -> None:
        """Watch these tensors, and no others."""
        self.remove()
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                if self._insides.get(tensor, tensor._cdata) != tensor._cdata:
                    renew_hooks(tensor)
            self._insides = {tensor: tensor._cdata for tensor in tensors}
        self._tensors, self._handles, self._taps = list(tensors), [], []
        self._averaged.clear()
        self._local.clear()
        self._local_versions.clear()
        for index, tensor in enumerate(tensors):
            if self._averages and _has_foreign(tensor._backward_hooks):
                self._averaged.add(index)
                self._handles.append(self._average_first(index, tensor))
            self._taps.append(self._tap(index, tensor))

    @property
    def is_attached(self) -> bool:
        """The hooks are where they were put: they go away with the inside of a tensor that the
        script swaps with another's (`torch.utils.swap_tensors`)."""
        with torch._C.DisableTorchFunctionSubclass():
            return all(tensor._cdata == inside for tensor, inside in self._insides.items())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients made inside stay where they are."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def keep(self, index: int) -> None:
        """Called inside backward: the gradient is not averaged in this pass."""
        gradient = self._tensors[index].grad
        assert gradient is not None
        if not self._local_versions or index in self._local_versions:
            # Noted when all are made: they may lie in one piece of memory, which has one version.
            self._local_versions.clear()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._note_versions)
        self._local[index] = weakref.ref(gradient)

    def _note_versions(self) -> None:
        made = ((index, gradient()) for index, gradient in self._local.items())
        self._local_versions = {index: g._version for index, g in made if g is not None}

    def refuse_changed(self) -> None:
        """What is kept is as backward passes left it, or cleared: by clipping, each worker would
        bound its own part of the whole gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, version in self._local_versions.items():
                gradient = self._tensors[index].grad
                if gradient is None or gradient is not self._local[index]():
                    continue
                if gradient._version != version and gradient.count_nonzero():
                    problem = "changed (clipped, perhaps) on each worker, before they are averaged."
                    fix = (
                        "run the last backward pass of a step outside paceline.no_sync(), and "
                        "unfreeze before the forward pass."
                    )
                    raise SpecError("gradients", problem, fix)

    def remove(self) -> None:
        for handle in (*self._handles, *self._taps):
            handle.remove()

    def _average_first(self, index: int, tensor: Tensor) -> RemovableHandle:
        """Before the script's hooks; Paceline's other ones, which scale, come after them."""

        def average(gradient: Tensor) -> Tensor:
            return self._average(index, gradient * self._context.training.weight())

        hooks: Any = tensor._backward_hooks
        before = sorted(hooks.items(), key=lambda pair: not is_foreign(pair[1]))
        handle: RemovableHandle = tensor.register_hook(average)
        for key, hook in before:
            del hooks[key]
            hooks[key] = hook
        return handle

    def _tap(self, index: int, tensor: Tensor) -> RemovableHandle:
        before = dict(tensor._post_accumulate_grad_hooks or {})

        def made(tensor: Tensor) -> None:
            # A tensor that servers have would ask them before each look at its `grad`.
            with self._remembered, torch._C.DisableTorchFunctionSubclass():
                # Not named: a gradient that has a name here would look held (`is_held`).
                if not self._paused and getattr(tensor.grad, "requires_grad", False):
                    raise SpecError("backward", *DIFFERENTIABLE)
                if self._paused and self._averages:
                    self.keep(index)
                if len(hooks) > 1 and _has_foreign(hooks):
                    self._stand_back(index, tensor)
                elif not self._paused:
                    if not self._in_pass:
                        self._begin_pass()
                    self._note(index)

        handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(made)
        hooks: dict[int, Any] = tensor._post_accumulate_grad_hooks
        for key, hook in before.items():  # the script's own come after ours
            del hooks[key]
            hooks[key] = hook
        return handle

    def _note(self, index: int) -> None:
        if index in self._inner:
            return
        if torch._C._current_graph_task_id() == self._pass:
            self._made.add(index)
            self._sink.made(index)
        elif index not in self._made:
            self._inner[index] = None
        else:
            problem, fix = TWICE
            shape = list(self._tensors[index].shape)
            raise SpecError("gradients", problem.format(shape=shape), fix)

    def _stand_back(self, index: int, tensor: Tensor) -> None:
        """The script's hooks come next: what they leave is exchanged when the pass is over."""
        gradient = tensor.grad
        if self._averages and gradient is not None:
            with torch.no_grad():
                gradient.copy_(self._average(index, gradient))
        if not self._paused and not self._in_pass:
            self._begin_pass()

    def _begin_pass(self) -> None:
        # As torch's own reducer does: when backward() returns, the exchange is done.
        self._in_pass = True
        self._made.clear()
        self._pass = torch._C._current_graph_task_id()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._pass_over)

    def _pass_over(self) -> None:
        self._in_pass = False
        self._clock.ready()
        with self._remembered:
            if self._averages:
                self._refuse_late_hooks()
            self._make_inner()
            self._sink.pass_over()

    def _make_inner(self) -> None:
        inner, self._inner = self._inner, {}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index in inner:
                self._sink.made(index)

    def _returned(self, raised: Exception | None) -> None:
        """`backward()` is left. Autograd calls nobody back where it was ended by an exception."""
        if not self._in_pass or isinstance(raised, PacelineError):
            return
        if raised is None:  # inside a pass that the script's own code called for, and caught
            self._pass_over()
            return
        self._in_pass = False
        self._inner.clear()
        with self._remembered, torch.no_grad():
            self._sink.pass_broken(raised)

    def _refuse_late_hooks(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            hooked = [i for i, tensor in enumerate(self._tensors) if tensor._backward_hooks]
            late = set(hooked) - self._averaged
            if any(_has_foreign(self._tensors[index]._backward_hooks) for index in late):
                problem = "a hook on a trained tensor was registered after distribute."
                fix = "register it before: then it gets the gradient of the whole batch."
                raise SpecError("register_hook", problem, fix)

    def _average(self, index: int, gradient: Tensor) -> Tensor:
        """The mean over the workers, who must all be at the same tensor."""
        plain = gradient.detach().as_subclass(Tensor)
        told = torch.cat([plain.flatten(), plain.new_tensor([float(index % MANY)])])
        mean = self._context.training.mean(told)
        if float(mean[-1]) != index % MANY:
            raise ExchangeError(
                "a hook on a trained tensor runs on some workers only, or in another order: every "
                "worker must use the same tensors where the script has hooks on them."
            )
        return mean[:-1].view(plain.shape)


def renew_hooks(tensor: Tensor) -> None:
    """Give a tensor new dictionaries of hooks.

    A tensor that a script swaps with another stays the same object and gets the other's inside.
    Hooks go with the old inside, but the dictionaries that tell of them stay: what is added to them
    would be called for the other tensor.
    """
    tensor._backward_hooks = OrderedDict()
    tensor._post_accumulate_grad_hooks = OrderedDict()


MANY = 256
"""Numbers below it are exact in any type of gradient."""


def _uses(tensor: Tensor) -> tuple[int, int]:
    """How many know the gradient, and how many the memory that it lies in; we are among both."""
    gradient = tensor.grad
    assert gradient is not None
    storage = gradient.untyped_storage()
    return sys.getrefcount(gradient), torch._C._storage_Use_Count(storage._cdata)


def _uses_of_a_new_one() -> tuple[int, int]:
    tensor = torch.zeros(1)
    tensor.grad = torch.zeros(1)
    return _uses(tensor)


_NEW = _uses_of_a_new_one()


def is_held(tensor: Tensor, *, in_own_memory: bool = False, surely: bool = False) -> bool:
    """The script knows this tensor's gradient, or memory that it is a part of (one flat buffer for
    all of them, a list of gradients to clear): there it expects the mean, not elsewhere.

    Called by nobody who has the gradient in a variable. `in_own_memory`: it lies in ours. `surely`:
    autograd itself shares memory among gradients, as that of `torch.cat` is cut; these do not count
    then, nor what the script hides by `detach()`. Of a tensor that several models share, another
    exchange knows the gradient too, for as long as it takes to leave: nothing can be said of it."""
    if getattr(tensor.grad, "layout", None) != torch.strided or _is_shared(tensor):
        return False
    knows, shares = _uses(tensor)
    if knows > _NEW[0]:
        return True
    if in_own_memory or shares <= _NEW[1]:
        return False
    return not surely or (tensor.grad is not None and tensor.grad._is_view())


def _is_shared(tensor: Tensor) -> bool:
    """Taps of two exchanges are on it; other hooks of ours only look."""
    hooks: dict[int, Any] = tensor._post_accumulate_grad_hooks or {}
    return len(hooks) > 1 and sum(hook.__module__ == __name__ for hook in hooks.values()) > 1


def is_foreign(hook: Any) -> bool:
    """It is the script's or another library's, not Paceline's."""
    return not str(getattr(hook, "__module__", "")).startswith("paceline.")


def _has_foreign(hooks: dict[int, Any] | None) -> bool:
    return hooks is not None and any(map(is_foreign, hooks.values()))


def with_mean_loss(
    closure: Callable[[], Any], after: Callable[[], None], context: Context
) -> Callable[[], Any]:
    """Optimizers that ask for the loss (LBFGS) must hear the same one on every worker: that of the
    whole batch, in which a worker's loss counts as much as its gradients.

    `after` is called when the closure has made its gradients.
    """

    def evaluate() -> Any:
        loss = closure()
        after()
        value = loss if isinstance(loss, Tensor) else torch.tensor(float(loss))
        weight = context.training.weight()  # without a sample the loss may not even be a number
        counted = value.detach() * weight if weight else torch.zeros_like(value)
        return context.training.mean(counted)

    return evaluate


StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


def with_closure(
    wrap: Callable[[Callable[[], Any]], Callable[[], Any]],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> StepArguments | None:
    """The arguments of `optimizer.step(closure)` with the closure wrapped; None without one.

    `arguments` are those a hook before the step gets: the optimizer itself comes first.
    """
    if callable(named.get("closure")):
        return arguments, {**named, "closure": wrap(named["closure"])}
    if len(arguments) > 1 and callable(arguments[1]):
        return (arguments[0], wrap(arguments[1]), *arguments[2:]), named
    return None
