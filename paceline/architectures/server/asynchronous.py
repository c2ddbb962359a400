"""`server` where every worker goes at its own pace: `async`, `bounded`, `quorum`.

Weights and optimizer are with the servers from the start, and what a worker sends is its own
gradient. In its first step they leave at `optimizer.step()`, so that a script may do with them what
it likes; one that did nothing lets them leave as they are made from then on.
"""

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import spec
from paceline.autograd.gradients import GradientTap, is_held
from paceline.autograd.mixing import mix_in
from paceline.autograd.trained import Trained, groups_of, refuse_max_norm
from paceline.collectives.context import Context
from paceline.errors import SpecError
from paceline.protocol.plan import placement_of
from paceline.served.exchange import Exchange
from paceline.served.setup import share_rest
from paceline.served.shapes import Exchanged, refuse_sparse, shape_of
from paceline.served.streaming import Streaming, push_weights
from paceline.served.updates import ELEMENTWISE, server_class, settings_of
from paceline.served.watching import HOLDS_GRADIENTS, Style, Watch
from paceline.served.weights import is_known_elsewhere

WAY_OUT = "Use them in the first step too: then gradients leave at optimizer.step() in every step."

UNTIL_STEP = (
    "Run a pass that may fail inside paceline.no_sync(): its gradients leave at optimizer.step()."
)


class AsynchronousServer:
    """One worker's side."""

    def __init__(self, options: spec.Server, context: Context) -> None:
        self._options, self._context = options, context
        self._where = f"architecture server:mode={options.mode}"
        self._tap = GradientTap(self, context, averages=False)
        self._watch = Watch()
        self._at_step = True
        """Gradients leave when the optimizer steps."""
        self._left: list[weakref.ref[Tensor] | None] = []
        """The gradients of the last step that was sent when the optimizer stepped, while they are
        there."""
        self._is_loading = False
        self._exchange: Exchange | None = None

    def distribute(self, trained: Trained) -> None:
        if placement_of(self._options, shape_of(self._context.identity)) != self._options.placement:
            self._context.note("no servers were asked for: the workers serve (colocated).")
        refuse_sparse(trained.model)
        refuse_max_norm(trained.model, self._context.identity.workers)
        self._trained, self._optimizer = trained, trained.optimizers[0]
        exchanged = self._describe(trained)
        if self._context.gradient_use is None and any(map(is_known_elsewhere, exchanged.tensors)):
            problem = (
                "weights lie in an array or in shared memory, where none would see them change."
            )
            raise SpecError(self._where, problem, "write mode=sync, or train copies of them.")
        self._exchange = exchange = Exchange(self._options, self._context, exchanged)
        known = {id(tensor) for tensor in exchanged.tensors}
        rest = [t for t in trained.everything() if id(t) not in known and t.numel()]
        share_rest(rest, exchange.meeting, self._context.identity.rank)
        self._streaming = Streaming(
            exchange,
            self._context,
            self._optimizer,
            self,
            steps=exchange.worker.machine.step,
            holds=False,
            way_out=WAY_OUT,
            before_write=self._refuse_writing,
        )
        self._tap.attach(exchanged.tensors)
        self._undo = mix_in(trained.model, Loading, _paceline_owner=self)

    @property
    def streaming(self) -> Streaming | None:
        """Where gradients leave as they are made; None while they leave at `step`."""
        return None if self._at_step else self._streaming

    def take(self, optimizer: Optimizer) -> None:
        problem = "the script steps another optimizer on the model."
        raise SpecError(self._where, problem, "use one with several groups, or mode=sync.")

    def no_sync(self) -> AbstractContextManager[None]:
        return self._tap.paused()

    def clip(self, max_norm: float) -> Tensor:
        """Bounds this worker's own gradient: there is no whole one."""
        return torch.nn.utils.clip_grad_norm_(self._streaming.tensors, max_norm)

    def settle(self) -> None:
        """The last answers may lack updates of this worker's own, and what others sent since."""
        self._streaming.settle()
        if self._exchange is not None:
            self._exchange.worker.fetch()
            self._streaming.settle()

    def counters(self) -> dict[str, object]:
        return self._exchange.counters() if self._exchange is not None else {}

    def close(self, *, failed: bool) -> None:
        self._tap.remove()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._undo()
            exchange.close(failed=failed)

    def follow(self) -> None:
        if not (self._tap.is_attached and self._streaming.weights.are_here):
            self._refuse_writing()

    def _describe(self, trained: Trained) -> Exchanged:
        if len(trained.optimizers) > 1:
            problem = f"{len(trained.optimizers)} optimizers train one model."
            raise SpecError(self._where, problem, "use one with several groups, or mode=sync.")
        kind = server_class(self._optimizer)
        if not kind:
            name, known = type(self._optimizer).__name__, ", ".join(ELEMENTWISE)
            problem = f"the optimizer runs on servers, part by part, and {name} cannot."
            raise SpecError(self._where, problem, f"write mode=sync, or use one of {known}.")
        lacking = set(trained.without_optimizer())  # nobody updates them
        named = [(name, tensor) for name, tensor in trained.named if name not in lacking]
        group_of = groups_of(self._optimizer)
        return Exchanged(
            names=[name for name, _ in named],
            tensors=[tensor for _, tensor in named],
            groups=[group_of[id(tensor)] for _, tensor in named],
            optimizer=kind,
            settings=settings_of(self._optimizer),
        )

    # Gradients; called by the tap, inside backward.

    def made(self, index: int) -> None:
        if not self._at_step and not self._streaming.has_begun:
            # Added to what the first step left: the script does not clear its gradients.
            left = self._left[index]
            self._at_step = left is not None and self._streaming.tensors[index].grad is left()
        if not self._at_step:
            self._streaming.take(index)

    def pass_over(self) -> None:
        if self._at_step and self._watch.is_on:
            tensors = self._streaming.tensors
            held = [tensor.grad is not None and is_held(tensor, surely=True) for tensor in tensors]
            if any(held):
                self._watch.refuse_servers(HOLDS_GRADIENTS)
            gradients = [tensor.grad for tensor in tensors]
            watched = self._watch.backward(gradients, settings_of(self._optimizer))
            for tensor, gradient, stays in zip(tensors, watched, held, strict=True):
                tensor.grad = tensor.grad if stays else gradient

    def pass_broken(self, error: Exception) -> None:
        if self._at_step:
            self.pass_over()
        else:
            self._streaming.refuse_broken_pass(error, UNTIL_STEP)

    # What the optimizer asks for: it is with the servers.

    def step(self) -> bool:
        if self._trained.update():
            problem = "the script trains other tensors than in the first step."
            raise SpecError(self._where, problem, "train them all from the start, or mode=sync.")
        self.follow()
        if not self._at_step:
            self._streaming.step()
            return True
        gradients = [tensor.grad for tensor in self._streaming.tensors]
        self._left = [None if one is None else weakref.ref(one) for one in gradients]
        if self._watch.is_on:
            style, why = self._watch.style(gradients, settings_of(self._optimizer))
            self._watch.is_on, self._at_step = False, style is not Style.STREAM
            if self._at_step:
                self._context.note(f"gradients leave at optimizer.step(): of the script, {why}.")
        self._streaming.send()
        return True

    def saved_state(self) -> dict[str, Any]:
        return self._streaming.saved_state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._streaming.load_state(state)

    def touch_state(self) -> None:
        problem = "the script looks at optimizer.state, and it is with the servers."
        raise SpecError(self._where, problem, "use optimizer.state_dict(), or write mode=sync.")

    # Weights from outside.

    def _refuse_writing(self) -> None:
        if not self._is_loading:
            problem = "the script changes weights outside the optimizer, and they are the servers'."
            raise SpecError(self._where, problem, "write mode=sync.")

    def load(self, act: Any) -> Any:
        """Loaded weights become the servers': worker 0's, where workers load different ones."""
        assert self._exchange is not None
        self.settle()
        self._is_loading = True
        try:
            return act()
        finally:
            self._is_loading = False
            self._exchange.collect()
            push_weights(self._exchange)


class Loading(torch.nn.Module):
    """Mixed into the model: what it loads reaches the servers."""

    _paceline_owner: Any

    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        load = super().load_state_dict
        return type(self)._paceline_owner.load(lambda: load(*arguments, **named))
