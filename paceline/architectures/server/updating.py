"""`server` where servers hold the weights and run the optimizer.

It is so in asynchronous modes, for built-in workloads, and for scripts that ask for it by
`update=server`. A layer waits for its own weights in the next forward pass (`served/weights.py`).
Gradients leave as backward makes them; where a loop clips, servers hold the step until
`optimizer.step()`; a script in an asynchronous mode that did not ask for `update=server` sends its
gradients at `optimizer.step()`, so that it may change them before. Which of these it is does not
change while a script trains: what it cannot serve is refused.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import spec
from paceline.architectures.server.requirements import served_part, where_and_fix
from paceline.autograd.gradients import GradientTap, with_mean_loss
from paceline.autograd.mixing import mix_in
from paceline.autograd.trained import Trained, refuse_max_norm
from paceline.collectives.context import Context
from paceline.errors import ExchangeError, SpecError
from paceline.served.exchange import Exchange, refuse_ended
from paceline.served.setup import share_rest
from paceline.served.shapes import note_members, refuse_sparse
from paceline.served.streaming import Streaming, push_weights

UNTIL_STEP = (
    "Run a pass that may fail inside paceline.no_sync(): its gradients leave at optimizer.step()."
)


class UpdatingServer:
    """One worker's side."""

    def __init__(self, options: spec.Server, context: Context) -> None:
        self._options, self._context = options, context
        self._where, self._fix = where_and_fix(options)
        self._leave = options.gradients_leave(context.gradient_use)
        self._tap = GradientTap(self, context, averages=options.exclusive)
        self._settled = 0
        self._is_loading = False
        self._exchange: Exchange | None = None

    def distribute(self, trained: Trained) -> None:
        if self._context.identity.has_joined:
            refuse_ended(self._context)
        note_members(self._options, self._context, trained.device)
        refuse_sparse(trained.model)
        refuse_max_norm(trained.model, self._context.identity.workers)
        self._trained, optimizer = trained, trained.optimizers[0]
        is_script = self._context.gradient_use is None
        exchanged = served_part(trained, self._options, is_script=is_script)
        self._exchange = exchange = Exchange(self._options, self._context, exchanged)
        known = {id(tensor) for tensor in exchanged.tensors}
        rest = [t for t in trained.everything() if id(t) not in known and t.numel()]
        share_rest(rest, exchange.meeting, self._context.identity.rank)
        has_state = bool(optimizer.state)
        self._streaming = Streaming(
            exchange,
            self._context,
            optimizer,
            self,
            holds=self._leave == "held",
            way_out=self._way_out,
            before_write=self._refuse_writing,
        )
        if has_state and self._context.identity.goes_on:
            self._confirm_state(exchange)
        self._tap.attach(exchanged.tensors)
        self._undo = mix_in(trained.model, Loading, _paceline_owner=self)

    @property
    def streaming(self) -> Streaming | None:
        """How gradients leave as they are made; None where they leave at `optimizer.step()`."""
        return None if self._leave == "at step" else self._streaming

    def take(self, optimizer: Optimizer) -> None:
        problem = "the script steps another optimizer on the model, and servers run one."
        raise SpecError(self._where, problem, f"use one with several groups, or {self._fix}.")

    def no_sync(self) -> AbstractContextManager[None]:
        return self._tap.paused()

    def clip(self, max_norm: float) -> Tensor:
        """Bounds this worker's own gradient in asynchronous modes: there is no whole one."""
        return torch.nn.utils.clip_grad_norm_(self._streaming.tensors, max_norm)

    def settle(self) -> None:
        self._streaming.settle()
        exchange, identity = self._opened, self._context.identity
        if not self._options.exclusive:
            # The last answers may lack updates of this worker's own, and what others sent since.
            exchange.worker.fetch()
            self._streaming.settle()
        elif not identity.has_joined:  # how often the others have done it is not known to it
            buffers = [b for b in self._trained.model.buffers() if b.numel()]
            key, lost = f"settled{self._settled}", exchange.worker.lost
            may_be_lost = lost if identity.goes_on else None
            share_rest(buffers, exchange.meeting, identity.rank, key, exchange.leader, may_be_lost)
            self._settled += 1

    def state(self) -> dict[str, Any]:
        """What compression has left out; a worker without it has nothing of its own."""
        kept = self._opened.worker.codec.left_out() if self._options.exclusive else {}
        return {"left_out": {c: values.clone() for c, values in kept.items()}} if kept else {}

    def restore(self, state: dict[str, Any], *, own: bool) -> None:
        if own:
            self._opened.worker.codec.put_back(state["left_out"])

    def counters(self) -> dict[str, object]:
        return self._exchange.counters() if self._exchange is not None else {}

    def close(self, *, failed: bool) -> None:
        self._tap.remove()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._undo()
            exchange.close(failed=failed)

    def follow(self) -> None:
        self._tap.refuse_changed()
        if not (self._tap.is_attached and self._streaming.weights.are_here):
            self._refuse_writing()

    @property
    def _opened(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    @property
    def _way_out(self) -> str:
        if self._options.exclusive:
            return (
                "Write server:update=worker: then averaged gradients and the optimizer stay here."
            )
        return "Leave update=server out: then gradients leave at optimizer.step()."

    def _confirm_state(self, exchange: Exchange) -> None:
        """Go on when servers have the optimizer's state: the worker that gives it may fail."""
        leader = exchange.leader
        if exchange.leads:
            exchange.worker.confirm()
        exchange.gather("assigned", "")
        if leader in exchange.worker.lost:
            raise ExchangeError(f"worker{leader} failed while it gave the servers state.")

    # Gradients; called by the tap, inside backward.

    def made(self, index: int) -> None:
        if self._leave != "at step":
            self._streaming.take(index)

    def pass_over(self) -> None:
        pass

    def pass_broken(self, error: Exception) -> None:
        if self._leave != "at step":
            way_out = self._way_out if self._options.exclusive else UNTIL_STEP
            self._streaming.refuse_broken_pass(error, way_out)

    # What the optimizer asks for: it is with the servers.

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        if self._options.exclusive:
            closure = with_mean_loss(closure, lambda: None, self._context)
        return closure()

    def step(self) -> None:
        if self._trained.update():
            problem = "the script trains other tensors than in the first step."
            raise SpecError(self._where, problem, f"train them all from the start, or {self._fix}.")
        self.follow()
        if self._leave == "at step":
            self._streaming.send()
        else:
            self._streaming.step()

    def saved_state(self) -> dict[str, Any]:
        return self._streaming.saved_state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._streaming.load_state(state)

    def touch_state(self) -> None:
        problem = "the script looks at optimizer.state, and it is with the servers."
        fix = f"use optimizer.state_dict(), or {self._fix}."
        raise SpecError(self._where, problem, fix)

    # Weights from outside.

    def _refuse_writing(self) -> None:
        if not self._is_loading:
            problem = "the script changes weights outside the optimizer, and they are the servers'."
            raise SpecError(self._where, problem, f"{self._fix}.")

    def load(self, act: Callable[[], Any]) -> Any:
        """Loaded weights become the servers': worker 0's, where workers load different ones."""
        self.settle()
        self._is_loading = True
        try:
            return act()
        finally:
            self._is_loading = False
            self._opened.collect()
            push_weights(self._opened)


class Loading(torch.nn.Module):
    """Mixed into the model: what it loads reaches the servers."""

    _paceline_owner: Any

    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        load = super().load_state_dict
        return type(self)._paceline_owner.load(lambda: load(*arguments, **named))
