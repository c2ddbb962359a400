"""A model without its memory: built on torch's meta device, and filled in part by part.

A worker of a pipeline holds some layers only, and yet must start from the very weights that the
whole model would have had. So the model is built without memory while every operation on a weight
is written down, random ones with the state of the generator before them; `fill` repeats what was
written down for the weights that are wanted. The generator moves on as if all had been made. A
constructor that does anything else with its weights is `NotRepeatable`, and its model built whole.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ModuleType = TypeVar("ModuleType", bound=nn.Module)


class NotRepeatable(Exception):  # noqa: N818 - no failure: the caller builds the model whole
    """A weight of this model depends on something that was not written down."""


class _Entry(NamedTuple):
    """A recorded operation on (a view of) a tensor."""

    function: Any
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None
    """Size, stride and offset of what it writes to; None for what makes the tensor."""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    random_state: Tensor | None


class _NoQuestions(TorchFunctionMode):
    """Stops a constructor that asks whether its weights have memory: it goes another way then, as
    some of torch's own do by leaving a weight as it was."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            raise NotRepeatable("the constructor asks for weights without memory")
        return func(*args, **(kwargs or {}))


class _Log(TorchDispatchMode):
    """Writes down what happens to tensors without memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: dict[int, list[_Entry]] = {}
        self._kept: list[Any] = []
        """Storages are told apart by address, so none may go before the log does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.get_rng_state() if random else None
        written = [one for one in _written(func._schema, args, kwargs) if _is_empty(one)]
        result = func(*args, **kwargs)
        if written:
            if len(written) > 1 or written[0] is not args[0]:
                raise NotRepeatable(f"{func} writes to several tensors, or not to its first")
            self._note(args[0], func, args[1:], kwargs, state, made=False)
        elif isinstance(result, Tensor) and _is_empty(result) and not tensors:
            self._note(result, func, args, kwargs, state, made=True)
        elif random and any(_is_empty(leaf) for leaf in pytree.tree_leaves(result)):
            raise NotRepeatable(f"{func} draws numbers after the pattern of a weight")
        return result

    @contextmanager
    def watching_starts(self) -> Iterator[None]:
        """Take torch's own ways to start a weight as one operation each.

        Some draw again until a number fits, and a tensor without memory cannot say when; some
        leave such a tensor as it is.
        """
        plain = {
            name: function
            for name, function in vars(nn.init).items()
            if name.startswith("_no_grad_") or (name.endswith("_") and name[0] != "_")
        }
        for name, function in plain.items():
            setattr(nn.init, name, self._watched(function))
        try:
            yield
        finally:
            for name, function in plain.items():
                setattr(nn.init, name, function)

    def _watched(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def start(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not _is_empty(tensor):
                return function(tensor, *args, **kwargs)
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self._note(tensor, function, args, kwargs, torch.get_rng_state(), made=False)
            return tensor

        return start

    def _note(
        self,
        tensor: Tensor,
        function: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        state: Tensor | None,
        *,
        made: bool,
    ) -> None:
        offset = int(tensor.storage_offset())
        view = None if made else (tuple(tensor.shape), tensor.stride(), offset)
        keywords = {**keywords, "device": torch.device("cpu")} if made else keywords
        entry = _Entry(function, view, arguments, keywords, state)
        if state is not None:  # meta tensors draw no numbers: draw them, and forget them
            target = None if made else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            _apply(entry, target)
        self._kept.append(tensor.untyped_storage())
        self.entries.setdefault(tensor.untyped_storage()._cdata, []).append(entry)


class Deferred(NamedTuple):
    """A model on the meta device, and the log from which it is filled."""

    model: nn.Module
    log: _Log

    @property
    def is_whole(self) -> bool:
        """Return whether the model has its memory already."""
        return not self.log.entries

    def fill(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """Give these modules their parameters and buffers, as a plain build makes them."""
        filled: dict[int, nn.Parameter] = {}
        for module in (inner for outer in modules for inner in outer.modules()):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if id(parameter) not in filled:
                        value = self._repeat(parameter).to(device)
                        filled[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
                        vars(filled[id(parameter)]).update(vars(parameter))
                    module._parameters[name] = filled[id(parameter)]
                elif parameter is not None:
                    filled[id(parameter)] = parameter
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    counts = _counts(module, name)
                    value = torch.zeros((), dtype=buffer.dtype) if counts else self._repeat(buffer)
                    module._buffers[name] = value.to(device)

    def copy(self, module: ModuleType, device: torch.device) -> ModuleType:
        """A copy with its own weights on `device`; the original's stay as they are."""
        unfilled = [t for t in (*module.parameters(), *module.buffers()) if t.is_meta]
        copied = copy.deepcopy(module, {id(tensor): tensor for tensor in unfilled})
        self.fill([copied], device)
        return copied.to(device)

    def check(self, module: nn.Module) -> None:
        """Raise `NotRepeatable` for a module that `fill` could not fill."""
        for inner in module.modules():
            _require_registered(inner)
            for name, tensor in (*inner._parameters.items(), *inner._buffers.items()):
                if tensor is not None and tensor.is_meta and not _counts(inner, name):
                    for entry in self._entries(tensor):
                        _require_values(entry)

    def _entries(self, tensor: Tensor) -> list[_Entry]:
        entries = self.log.entries.get(tensor.untyped_storage()._cdata)
        if not entries or entries[0].view is not None:
            raise NotRepeatable(f"a tensor of shape {tuple(tensor.shape)} was made from others")
        return entries

    def _repeat(self, tensor: Tensor) -> Tensor:
        entries = self._entries(tensor)
        before = torch.get_rng_state()
        try:
            made = _apply(entries[0], None)
            for entry in entries[1:]:
                assert entry.view is not None
                _apply(entry, made.as_strided(*entry.view))
        finally:
            torch.set_rng_state(before)
        return made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def build_deferred(build: Callable[[], nn.Module]) -> Deferred:
    """Call `build` without giving its tensors memory; `NotRepeatable` where it needs numbers."""
    log = _Log()
    try:
        with log.watching_starts(), torch.device("meta"), _NoQuestions(), log:
            model = build()
    except Exception as error:  # whatever is wrong with it as well comes up when it is built whole
        raise NotRepeatable(str(error)) from error
    return Deferred(model, log)


def build_whole(build: Callable[[], nn.Module]) -> Deferred:
    """The same for a model that cannot be repeated in parts: everything is there, nothing to do."""
    return Deferred(build(), _Log())


def _counts(module: nn.Module, name: str) -> bool:
    """Return whether this is a batch norm's counter: it starts at 0, in a way no log can see."""
    return isinstance(module, _NormBase) and name == "num_batches_tracked"


def _is_empty(value: Any) -> bool:
    """Return whether this is a tensor without memory; not by `is_meta`, which constructors may not
    ask."""
    return isinstance(value, Tensor) and value.device.type == "meta"


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    if not schema.is_mutable:
        return []
    written: list[Any] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            written += pytree.tree_leaves(given)
    return written


def _require_registered(module: nn.Module) -> None:
    """Raise NotRepeatable for a tensor or a hook of a module that is not filled in."""
    kept = ("_parameters", "_buffers", "_modules")
    others = {name: value for name, value in vars(module).items() if name not in kept}
    if any(_is_empty(leaf) for leaf in pytree.tree_leaves(others)):
        raise NotRepeatable(f"{type(module).__name__} keeps a tensor that is no buffer")
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise NotRepeatable(f"{name} has hooks")
        if type(parameter) is not nn.Parameter:
            raise NotRepeatable(f"{name} is a {type(parameter).__name__}")


def _require_values(entry: _Entry) -> None:
    leaves = pytree.tree_leaves((entry.arguments, entry.keywords))
    if any(_is_empty(leaf) for leaf in leaves):
        raise NotRepeatable(f"{entry.function} reads a weight that has no value here")
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise NotRepeatable(f"{entry.function} draws from a generator of its own")


@torch.no_grad()
def _apply(entry: _Entry, target: Tensor | None) -> Tensor:
    _require_values(entry)
    before = torch.get_rng_state()
    if entry.random_state is not None:
        torch.set_rng_state(entry.random_state)
    given = () if target is None else (target,)
    result: Tensor = entry.function(*given, *entry.arguments, **entry.keywords)
    if entry.random_state is None:
        torch.set_rng_state(before)
    return result
