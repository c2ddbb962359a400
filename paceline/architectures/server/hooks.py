"""Where the exchange meets autograd: gradients leave as they are made, layers wait for their own.

`Backward` cuts gradients into chunks the moment autograd has them. `Forward` lets a layer start
when its own weights are there, and learns from one real pass which layer uses which parameter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.architectures.server.exchange import WorkerSide
from paceline.architectures.server.memory import Piece, as_run, pieces_of
from paceline.errors import ExchangeError
from paceline.protocol import Layout, Ready

Named = Sequence[tuple[str, torch.nn.Parameter]]


class Backward:
    """Turns autograd's gradients into chunks and submits them."""

    def __init__(self, named: Named, layout: Layout, worker: WorkerSide) -> None:
        self.synchronizes = True
        """False inside `no_sync`: gradients only accumulate."""
        self.hold = False
        self.before_first: Callable[[], None] = lambda: None
        """Called when the first gradient of a step is made."""
        self._named, self._layout, self._worker = named, layout, worker
        self.stand_ins: Sequence[Tensor | None] = [None] * len(named)
        """What each parameter's `grad` becomes when its gradient has left."""
        self._chunks_of: list[list[int]] = [[] for _ in named]
        for chunk in layout.chunks:
            for index in chunk.parameters:
                self._chunks_of[index].append(chunk.index)
        self._runs: dict[int, Tensor] = {}
        self._begin()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, (_, parameter) in enumerate(named)
        ]

    def finish(self) -> None:
        """Submit what is left of a step: what no_sync gathered, and chunks without a gradient."""
        for index, (_, parameter) in enumerate(self._named):
            left = parameter.grad is not None and parameter.grad is not self.stand_ins[index]
            if left and index not in self._made:
                self._take(index, parameter)
        rest = [chunk for chunk, parts in enumerate(self._open) if parts > 0]
        if rest and not self._made:
            self.before_first()
        self._submit(rest)
        self._begin()

    def clear(self) -> None:
        """The step is over: no gradient is left to be seen."""
        for _, parameter in self._named:
            parameter.grad = None

    def has_submitted(self, chunks: frozenset[int]) -> bool:
        """Some of these chunks are already on their way in this step."""
        return bool(self._made) and any(self._open[chunk] == 0 for chunk in chunks)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self) -> None:
        self._runs.clear()
        self._made: set[int] = set()
        self._open = [len(chunk.parameters) for chunk in self._layout.chunks]

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def made(parameter: Tensor) -> None:
            if self.synchronizes:
                self._take(index, parameter)

        return made

    def _take(self, index: int, parameter: Tensor) -> None:
        if index in self._made:
            raise ExchangeError(
                f"{self._named[index][0]} got a second gradient before optimizer.step(); "
                "run all but the last backward of a step inside paceline.no_sync()."
            )
        if not self._made:
            self.before_first()
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise ExchangeError(f"{self._named[index][0]} has a sparse gradient; chunks are dense.")
        parameter.grad = self.stand_ins[index]
        self._made.add(index)
        self._runs[index] = as_run(gradient, parameter)
        complete = []
        for chunk in self._chunks_of[index]:
            self._open[chunk] -= 1
            if self._open[chunk] == 0:
                complete.append(chunk)
        self._submit(complete)
        if len(complete) == len(self._chunks_of[index]):
            del self._runs[index]

    def _submit(self, chunks: Sequence[int]) -> None:
        ready: list[tuple[Ready, list[Piece]]] = []
        for chunk in chunks:
            facts = self._layout.chunks[chunk]
            pieces = pieces_of(facts, self._layout, self._runs)
            absent = tuple(index for index in facts.parameters if index not in self._runs)
            event = Ready(chunk, empty=not pieces, absent=absent, hold=self.hold)
            ready.append((event, pieces))
        if ready:
            self._worker.submit(ready)


class Forward:
    """Makes every layer wait for the weights it uses, and for no others."""

    def __init__(
        self,
        model: torch.nn.Module,
        named: Named,
        layout: Layout,
        worker: WorkerSide,
        backward: Backward,
        waited: Callable[[float], None],
    ) -> None:
        self._model, self._named, self._layout = model, named, layout
        self._worker, self._backward, self._waited = worker, backward, waited
        self._handles: list[RemovableHandle] = []
        self._root = model.register_forward_pre_hook(self._first_pass)

    def remove(self) -> None:
        for handle in (self._root, *self._handles):
            handle.remove()

    def _wait(self, chunks: frozenset[int]) -> None:
        if self._worker.idle:
            return
        # A layer recomputed inside backward has not submitted its own chunks yet.
        if self._backward.has_submitted(chunks):
            raise ExchangeError(
                "the model runs between backward and optimizer.step(), when some of its weights "
                "are new and some old; run all but the last backward of a step inside "
                "paceline.no_sync(), and evaluate after optimizer.step()."
            )
        self._waited(self._worker.wait(chunks))

    def _first_pass(self, model: torch.nn.Module, inputs: Any) -> None:
        """Before anything is known every weight must be there; then watch who uses which."""
        self._wait(frozenset(range(len(self._layout.chunks))))
        if torch.compiler.is_compiling() or hasattr(model, "_orig_mod"):
            return  # a compiled graph cannot stop between layers
        self._root.remove()
        watch = Watch(model, {id(p): i for i, (_, p) in enumerate(self._named)})
        self._root = model.register_forward_hook(lambda *_: self._learn(watch), always_call=True)

    def _learn(self, watch: "Watch") -> None:
        watch.remove()
        self._root.remove()
        unseen = [i for i in range(len(self._named)) if i not in watch.users]
        order = {index: place for place, index in enumerate([*unseen, *watch.users])}
        self._worker.reorder(
            [min(order[i] for i in chunk.parameters) for chunk in self._layout.chunks]
        )
        uses: dict[torch.nn.Module, set[int]] = {self._model: set(unseen)}
        for index, module in watch.users.items():
            uses.setdefault(module, set()).add(index)
        index_of = {id(p): i for i, (_, p) in enumerate(self._named)}
        for module in self._model.modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) in index_of:
                    uses.setdefault(module, set()).add(index_of[id(parameter)])
        for module, indices in uses.items():
            chunks = frozenset(
                c.index for c in self._layout.chunks if not indices.isdisjoint(c.parameters)
            )
            hook = self._hook(chunks)
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def _hook(self, chunks: frozenset[int]) -> Callable[..., None]:
        def before(module: torch.nn.Module, inputs: Any) -> None:
            self._wait(chunks)

        return before


class Watch(TorchFunctionMode):
    """Sees every torch function a forward pass calls, and in which module."""

    def __init__(self, model: torch.nn.Module, index_of: dict[int, int]) -> None:
        super().__init__()
        self.users: dict[int, torch.nn.Module] = {}
        """Parameter -> the innermost module that used it first, in order of use."""
        self._index_of = index_of
        self._stack: list[torch.nn.Module] = [model]
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            if module is not model:
                self._handles += [
                    module.register_forward_pre_hook(lambda m, _: self._stack.append(m)),
                    module.register_forward_hook(self._leave, always_call=True),
                ]
        self.__enter__()  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _leave(self, *_: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for part in value if isinstance(value, (list, tuple)) else (value,):
                index = self._index_of.get(id(part))
                if index is not None:
                    self.users.setdefault(index, self._stack[-1])
        return func(*args, **(kwargs or {}))
