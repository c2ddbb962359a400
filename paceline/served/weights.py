"""What a script sees of its weights, gradients and optimizer while they are with the servers.

Weights are whole whenever they are touched. A trained tensor keeps being the script's own object,
but changes class: whatever torch function takes it waits first until its newest values are here, so
a layer waits for its own weights only and it does not matter who reads them: a forward pass, an
average of weights, `state_dict`. Writing them is refused. Views that a script gets hold of
(`p.data`, `p.detach()`) are of a class that does the same. Of `set_` torch tells nobody: that a
tensor has other memory is seen before the next gradients.

A gradient that has gone can be cleared, and where the servers hold a step back until
`optimizer.step()`, its norm can be asked for and it can be scaled, which is all that clipping by
global norm does. Anything else is an error with the way out: a wrong number would be worse.

Schedulers and scripts hold on to the optimizer they made, so it is not replaced: it changes class.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.autograd.gradients import uncompiled
from paceline.autograd.mixing import ORIGINAL, mix_in
from paceline.errors import ExchangeError

WAY_OUT = "Write server:update=worker: then averaged gradients and the optimizer stay here."

DESCRIBING = (
    *("device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn"),
    *("is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "itemsize", "layout", "name"),
    *("names", "nbytes", "ndim", "output_nr", "requires_grad", "retains_grad", "shape"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
)
"""Properties that tell of a tensor and not of its values; below, the methods that do."""

ASKING = (
    *("data_ptr", "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous"),
    *("is_floating_point", "is_pinned", "is_same_size", "is_signed", "ndimension", "nelement"),
    *("numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
    *("retain_grad", "size", "storage_offset", "stride", "__hash__", "__len__"),
)


def _untouching() -> set[Any]:
    """Functions that look at a tensor's description and not at its values."""
    functions: list[Any] = [
        getattr(Tensor, name).__get__ for name in DESCRIBING if hasattr(Tensor, name)
    ]
    functions += [getattr(Tensor, name) for name in ASKING if hasattr(Tensor, name)]
    functions += [getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")]
    functions += [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size]
    functions += [torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like]
    return set(functions)


UNTOUCHING = _untouching()
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
WRITING = {"__setitem__", "module_load", *(f"__i{name}__" for name in OPERATORS)}
"""Beside those whose name ends with an underscore."""


@functools.lru_cache(maxsize=4096)
def writes(function: Any) -> bool:
    """Whether a torch function changes its first argument."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in WRITING or function == SET_DATA


def is_known_elsewhere(tensor: Tensor) -> bool:
    """It lies in memory that is neither torch's alone nor ours, of an array or shared with other
    processes: who reads it there would no longer see it change."""
    if tensor.device.type != "cpu" or isinstance(tensor, Watched):
        return False
    return tensor.is_shared() or not tensor.untyped_storage().resizable()


def is_viewed(tensor: Tensor) -> bool:
    """Somebody else holds its memory, and would no longer see it change."""
    alone = 2  # the tensor, and the handle asked here
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > alone)


class ServedWeights:
    """The tensors of one exchange while servers hold their values."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        before_read: Callable[[int], None],
        before_write: Callable[[], None],
    ) -> None:
        """`before_read` is called with a tensor's number; `before_write` refuses."""
        self.tensors = list(tensors)
        self._before_read, self._before_write = before_read, before_write
        self._number = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._kinds = [type(tensor) for tensor in tensors]
        self._views: list[Tensor] = []
        self.order: dict[int, None] = {}
        """Numbers in the order in which they were first read."""

    def install(self, views: Sequence[Tensor]) -> None:
        """Let each tensor have the values of its view, and its new class."""
        self._views = list(views)
        classes = {kind: self._class_of(kind) for kind in set(self._kinds)}
        for tensor, view, kind in zip(self.tensors, views, self._kinds, strict=True):
            tensor.data = view
            tensor.__class__ = classes[kind]

    @property
    def are_here(self) -> bool:
        """Every tensor has the memory that it was given."""
        with torch._C.DisableTorchFunctionSubclass():
            return all(map(self._is_here, range(len(self.tensors))))

    def _is_here(self, number: int) -> bool:
        return self.tensors[number].data_ptr() == self._views[number].data_ptr()

    def read(self, tensor: Tensor) -> None:
        number = self._number.get(id(tensor))
        if number is not None:
            self.order.setdefault(number)
            self._before_read(number)

    def write(self) -> None:
        self._before_write()

    def alias(self, tensor: Tensor, made: Tensor) -> Tensor:
        """`made` shares the memory of a tensor: let it be seen when it is used."""
        seen: WatchedView = made.as_subclass(WatchedView)
        seen.of, seen.weights = tensor, self
        return seen

    def _class_of(self, kind: type) -> type:
        facts = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            ORIGINAL: kind,
            "weights": self,
        }
        return types.new_class(kind.__name__, (Served, kind), {}, lambda space: space.update(facts))


class Watched(Tensor):
    """One of which every use is seen: it shares memory with served weights."""

    weights: ServedWeights

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _touch(func, args, kwargs or {})


class Served(Watched):
    """Mixed into the class of a tensor whose values the servers hold."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = _plain(self).clone().requires_grad_(self.requires_grad)
        if issubclass(getattr(type(self), ORIGINAL), torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = getattr(type(self), ORIGINAL)
        plain = _plain(self)
        if issubclass(kind, torch.nn.Parameter):
            return torch.nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)
        return plain.requires_grad_(self.requires_grad).__reduce_ex__(protocol)


class WatchedView(Watched):
    """A view of served weights in the script's hands."""

    of: Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = _plain(self).clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _touch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a torch function on served weights: wait for what it reads, announce what it writes."""
    if func in UNTOUCHING:
        return func(*args, **kwargs)
    target = (args[:1] or kwargs) if writes(func) else kwargs.get("out")
    written = _found(target, [])
    for tensor in written:
        tensor.weights.write()
    read = _found((args, kwargs), [])
    for tensor in read:
        tensor.weights.read(_served(tensor))
    versions = [tensor._version for tensor in read]
    result = func(*args, **kwargs)
    if written or not read:
        return result
    if versions != [tensor._version for tensor in read]:
        raise ExchangeError(
            f"{getattr(func, '__name__', func)} changes weights while it reads them, and they are "
            f"with the servers. Change them after the step instead, alike on all. {WAY_OUT}"
        )
    if func is Tensor.numpy:
        result.flags.writeable = False  # what is written there would be lost
        return result
    if isinstance(result, Tensor) and not result.requires_grad:
        return _aliased(result, read)
    return result


def _aliased(result: Tensor, read: Sequence[Any]) -> Tensor:
    if type(result) is not Tensor or result.layout != torch.strided:
        return result
    memory = _memory(result)
    for tensor in read:
        if tensor.layout == torch.strided and _memory(tensor) == memory:
            aliased: Tensor = tensor.weights.alias(_served(tensor), result)
            return aliased
    return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _found(value: Any, into: list[Any]) -> list[Any]:
    """Add the served weights and views among arguments, in lists and dictionaries too.

    Called in each layer of each step: without generators, which cost more than the search."""
    if isinstance(value, (list, tuple)):
        for part in value:
            _found(part, into)
    elif isinstance(value, dict):
        for part in value.values():
            _found(part, into)
    elif isinstance(value, Watched):
        into.append(value)
    return into


def _served(tensor: Watched) -> Tensor:
    """Whose memory it is, or has a part of."""
    return tensor.of if isinstance(tensor, WatchedView) else tensor


def _plain(tensor: Tensor) -> Tensor:
    """The values as an ordinary tensor, waited for; shares memory."""
    if isinstance(tensor, Watched):
        tensor.weights.read(_served(tensor))
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


CLEARING = (Tensor.zero_, torch._foreach_zero_)


class HeldGradient(Tensor):
    """What a tensor's `grad` is while the gradient is with the servers: a shape and no data."""

    of: Tensor
    norm_of: Callable[[], float]
    scale_by: Callable[[float], None]
    way_out: str

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        norm_of: Callable[[], float],
        scale_by: Callable[[float], None],
        way_out: str,
    ) -> "HeldGradient":
        made: HeldGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.of, made.norm_of, made.scale_by, made.way_out = like, norm_of, scale_by, way_out
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.linalg.vector_norm and args[1:] in ((), (2,), (2.0,)):
            return torch.tensor(args[0].norm_of())
        if func is Tensor.mul_ and isinstance(args[0], HeldGradient):
            args[0].scale_by(float(args[1]))
            return args[0]
        if func in CLEARING:
            for held in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
                held.of.grad = torch.zeros_like(held.of)  # unlike None, it takes part in a step
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        held = next(arg for arg in args if isinstance(arg, HeldGradient))
        raise ExchangeError(
            f"{func} needs a gradient that has gone to the servers: the script uses it, or adds to "
            f"it without zero_grad(). {held.way_out}"
        )


class Owner(Protocol):
    """Who updates in the optimizer's place."""

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call what the script gives to `optimizer.step`; returns the loss."""

    def step(self) -> None:
        """All gradients of a step are made."""

    def saved_state(self) -> dict[str, Any]:
        """What the optimizer's own `state_dict` would give."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take a saved state."""

    def touch_state(self) -> None:
        """The script looks at `optimizer.state` itself, which is not here."""


class Remote(Optimizer):
    """Mixed into the optimizer's own class; asks its owner in place of updating by itself."""

    _paceline_owner: Owner

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = type(self)._paceline_owner.evaluate(closure)
        self._opt_called = True  # schedulers ask whether a step came before theirs
        type(self)._paceline_owner.step()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:  # what has gone cannot be written to: see `HeldGradient`
            super().zero_grad(set_to_none=False)
            return
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return type(self)._paceline_owner.saved_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        type(self)._paceline_owner.load_state(state_dict)

    @property
    def state(self) -> Any:
        type(self)._paceline_owner.touch_state()
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        type(self)._paceline_owner.touch_state()
        vars(self)["state"] = value


def make_remote(optimizer: Optimizer, owner: Owner) -> Callable[[], None]:
    """Change the optimizer's class; returns what changes it back."""
    wrapped = vars(optimizer).pop("step", None)  # by a scheduler that was made before
    plain = {"step": uncompiled(Remote.step), "zero_grad": uncompiled(Remote.zero_grad)}
    undo = mix_in(optimizer, Remote, _paceline_owner=owner, **plain)
    remote: Any = optimizer
    remote._patch_step_function()

    def restore() -> None:
        undo()
        if wrapped is not None:
            remote.step = wrapped

    return restore
