"""`server` where all workers take a step together: trains as one worker would, any script.

It starts with averaged gradients and the script's own optimizer. When a step has shown that the
script needs no more than its weights, all workers agree to let gradients leave as they are made and
servers update (`streaming`). A script that later changes weights, the optimizer's state or what is
trained gets them back, and is watched once more.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import spec
from paceline.autograd.divergence import (
    OTHER_WEIGHTS,
    are_other,
    is_looked_at,
    refuse_other,
    stretch_of,
)
from paceline.autograd.gradients import (
    GradientTap,
    Remembered,
    StepArguments,
    is_foreign,
    is_held,
    uncompiled,
    with_closure,
    with_mean_loss,
)
from paceline.autograd.trained import Trained, groups_of, refuse_max_norm
from paceline.collectives.context import Context
from paceline.collectives.notes import Meeting
from paceline.errors import ExchangeError, SpecError
from paceline.protocol.plan import placement_of, why_no_second_homes
from paceline.served.device import is_apart
from paceline.served.exchange import Exchange, of_opening, present_opening
from paceline.served.setup import share_rest
from paceline.served.shapes import Exchanged, refuse_sparse, shape_of
from paceline.served.streaming import Streaming, assign_weights
from paceline.served.updates import is_elementwise_state, server_class, settings_of
from paceline.served.watching import HOLDS_GRADIENTS, Style, Watch
from paceline.served.weights import WAY_OUT, is_known_elsewhere

SERVED = "served"
"""The note that tells one who joins how servers update, or why they do not."""

PATIENCE = 2
"""So often a script may take its weights back before they stay with the workers for good."""


class SynchronousServer:
    """One worker's side."""

    def __init__(self, options: spec.Server, context: Context) -> None:
        self._options, self._context = options, context
        self._tap = GradientTap(self, context, averages=True)
        self._streaming: Streaming | None = None
        self._watch = Watch()
        self._watches = options.update != "worker"
        self._seen: tuple[Style, str] | None = None
        self._given: list[weakref.ref[Tensor] | None] = []
        """The means that were handed out last; they live for as long as the script wants them."""
        self._versions: list[int] = []
        self._held: set[int] = set()
        """Numbers of the tensors whose gradient the script knows: there it finds the mean."""
        self._has_passed = False
        """Gradients were averaged since the last step: what is done to them now is to means."""
        self._opening = self._steps = self._decisions = self._returns = self._settled = 0
        self._exchange: Exchange | None = None

    def distribute(self, trained: Trained) -> None:
        shape = shape_of(self._context.identity, accelerated=is_apart(trained.device))
        if placement_of(self._options, shape) != self._options.placement:
            self._context.note("no servers were asked for: the workers serve (colocated).")
        if self._context.identity.goes_on and (why := why_no_second_homes(self._options, shape)):
            self._context.note(f"the loss of a server stops the job: {why}.")
        refuse_sparse(trained.model)
        refuse_max_norm(trained.model, self._context.identity.workers)
        self._trained = trained
        style = self._style_to_join() if self._joins else None
        self._open()
        first = Meeting(of_opening(self._context, 0))
        share_rest(self._rest(), first, self._context.identity.rank)
        for optimizer in trained.optimizers:
            optimizer.register_step_pre_hook(uncompiled(self._before_step))
        trained.optimizers[-1].register_step_post_hook(uncompiled(self._after_step))
        if style is not None:
            self._steps = self._opened.worker.machine.step
            self._stream(style)
        elif self._context.gradient_use is not None and self._watches:
            self._foresee(clips=self._context.gradient_use == "clip")

    @property
    def streaming(self) -> Streaming | None:
        """Where gradients leave as they are made; None while workers update by themselves."""
        return self._streaming

    def take(self, optimizer: Optimizer) -> None:
        """From here on servers only average: they run one optimizer, not several."""
        if self._streaming is not None:
            if self._streaming.has_begun:
                raise ExchangeError(
                    "an optimizer that distribute was not given takes the step, and gradients have "
                    f"gone to the servers for the one before. {WAY_OUT}"
                )
            self._take_back()
        self._watches = False
        optimizer.register_step_pre_hook(uncompiled(self._before_step))

    def no_sync(self) -> AbstractContextManager[None]:
        return self._tap.paused()

    def clip(self, max_norm: float) -> Tensor:
        if self._streaming is None:
            self._exchange_rest()
        return torch.nn.utils.clip_grad_norm_(self._opened.exchanged.tensors, max_norm)

    def settle(self) -> None:
        """Weights are there, and buffers (the statistics of batch norm) are the leader's."""
        if self._streaming is not None:
            self._streaming.settle()
        else:
            with Remembered(self._context):
                refuse_other(self._opened.exchanged.tensors, self._context)
        if self._joins:  # how often the others have done it is not known here
            return
        buffers = [b for b in self._trained.model.buffers() if b.numel()]
        opened, key = self._opened, f"settled{self._settled}"
        identity, lost = self._context.identity, opened.worker.lost
        may_be_lost = lost if identity.goes_on else None
        share_rest(buffers, opened.meeting, identity.rank, key, opened.leader, may_be_lost)
        self._settled += 1

    def state(self) -> dict[str, Any]:
        """What compression has left out; a worker without it has nothing of its own."""
        kept = self._opened.worker.codec.left_out()
        return {"left_out": {c: values.clone() for c, values in kept.items()}} if kept else {}

    def restore(self, state: dict[str, Any], *, own: bool) -> None:
        if own:
            self._opened.worker.codec.put_back(state["left_out"])

    def counters(self) -> dict[str, object]:
        return self._exchange.counters() if self._exchange is not None else {}

    def close(self, *, failed: bool) -> None:
        self._tap.remove()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.close(failed=failed)

    def follow(self) -> None:
        self._tap.refuse_changed()
        if self._tap.is_attached and not self._are_elsewhere:
            return
        if self._streaming is not None:
            self._take_back()
        self._tap.attach(self._opened.exchanged.tensors)

    # A job that runs.

    @property
    def _joins(self) -> bool:
        return self._context.identity.has_joined

    def _style_to_join(self) -> Style:
        """How the others train: they must have left their weights to the servers."""
        try:
            self._opening = present_opening(self._context)
            meeting = Meeting(of_opening(self._context, self._opening))
            told = meeting.read(SERVED, str, "worker0")
        except ExchangeError as error:
            problem = "the job ended before this worker got in."
            raise SpecError("--join", problem, "start another one.") from error
        if not told.isdigit():
            problem = f"the servers do not have the weights: of the script, {told}."
            raise SpecError("--join", problem, "start the job with all its workers.")
        return Style(int(told))

    def _tell_who_joins(self, text: str) -> None:
        if self._opened.leads:
            self._opened.meeting.leave(SERVED, text)

    # What is exchanged.

    @property
    def _opened(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    def _open(self) -> None:
        named, optimizers = self._trained.named, self._trained.optimizers
        kind = server_class(optimizers[0])
        self._whole = len(optimizers) == 1 and not self._trained.without_optimizer()
        """One optimizer updates all that is exchanged."""
        serves = bool(kind) and self._whole and self._watches
        group_of = groups_of(optimizers[0])
        exchanged = Exchanged(
            names=[name for name, _ in named],
            tensors=[tensor for _, tensor in named],
            groups=[group_of[id(tensor)] if serves else 0 for _, tensor in named],
            optimizer=kind if serves else "",
            settings=settings_of(optimizers[0]) if serves else [],
        )
        self._exchange = Exchange(self._options, self._context, exchanged, self._opening)
        self._is_stale = False
        """The script trains something else than is exchanged; mended when the pass is over,
        or with servers that update when it steps."""
        self._given = [None] * len(named)
        self._steps = 0
        self._tap.attach(exchanged.tensors)

    def _reopen(self) -> None:
        """The script trains something else now; all who began go on with it."""
        workers = [f"worker{rank}" for rank in sorted(self._opened.worker.lost)]
        lost, joined = [*self._opened.lost_servers, *workers], self._opened.joined
        if others := [*(f"{name} was lost" for name in lost), *(f"{n} joined" for n in joined)]:
            what = " and ".join(others)
            raise ExchangeError(f"the script trains other tensors than before, and {what}.")
        self._opened.close(failed=False, again=True)
        self._opening += 1
        self._open()
        self._context.note("the script trains other tensors than before: exchanged from here on.")

    def _rest(self) -> list[Tensor]:
        exchanged = {id(tensor) for tensor in self._opened.exchanged.tensors}
        return [t for t in self._trained.everything() if id(t) not in exchanged and t.numel()]

    # Gradients; called by the tap, inside backward.

    def made(self, index: int) -> None:
        tensor = self._opened.exchanged.tensors[index]
        if not self._opened.cutter.made:
            self._is_stale = self._is_stale or self._trained.update()
            was_added_to = self._streaming is not None and self._is_given(index)
            if was_added_to:  # the script never clears it
                self._take_back()
                self._watch.refuse_servers("it does not clear gradients after a step")
        if self._is_stale:
            if self._streaming is not None:
                self._tap.keep(index)
            return
        if self._streaming is None:
            self._take(index, tensor)
        else:
            self._streaming.take(index)

    def _take(self, index: int, tensor: Tensor) -> None:
        is_ours = self._is_given(index) and index not in self._held
        self._held.discard(index)
        if is_held(tensor, in_own_memory=is_ours):
            self._held.add(index)
            if is_held(tensor, in_own_memory=is_ours, surely=True):
                self._watch.refuse_servers(HOLDS_GRADIENTS)
        assert tensor.grad is not None
        self._opened.cutter.take(index, tensor.grad, mean=True)

    def pass_over(self) -> None:
        """Servers only average: after it every `grad` is the mean."""
        if self._streaming is not None:
            return
        if self._is_stale:
            self._reopen()
        tensors, cutter = self._opened.exchanged.tensors, self._opened.cutter
        for index, tensor in enumerate(tensors):
            if index not in cutter.made and tensor.grad is not None:  # accumulated before
                self._take(index, tensor)
        # Copied: a script may write to them (clipping, adding up) while they still leave from here.
        waited, copies = self._opened.means(copied=True)
        self._steps += 1
        self._context.clock.charge("exchange_exposed", waited)
        means: list[Tensor | None] = []
        held = [
            (index, gradient)
            for index in self._held
            if (gradient := tensors[index].grad) is not None
        ]
        for tensor in tensors:
            tensor.grad = None  # what it had has been summed: its memory is free for the mean
            means.append(next(copies))
            tensor.grad = means[-1]
        if self._watches:
            means = self._watch.backward(means, self._settings())
        else:
            self._compare_weights(tensors)
        for index, gradient in held:
            mean = means[index]
            assert mean is not None, "this worker brought its part"
            means[index] = gradient.copy_(mean)
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.grad = mean
        self._has_passed = True
        self._given = [None if mean is None else weakref.ref(mean) for mean in means]
        self._versions = [0 if mean is None else mean._version for mean in means]

    def pass_broken(self, error: Exception) -> None:
        if self._streaming is not None:
            self._streaming.refuse_broken_pass(error, WAY_OUT)
        else:
            self.pass_over()

    def _compare_weights(self, tensors: Sequence[Tensor]) -> None:
        """The servers have no weights of their own to tell that a worker's have become others."""
        if self._joins or not is_looked_at(self._steps):
            return
        if self._context.identity.goes_on:  # a mean is over all who began
            return
        stretch = stretch_of(tensors, self._steps)
        if stretch is None:
            return
        own = stretch.mean()
        mean = float(self._context.training.mean(own))
        if are_other(mean, float(own), float(stretch.abs().mean()), stretch.dtype):
            raise ExchangeError(OTHER_WEIGHTS)

    @torch.no_grad()
    def _exchange_rest(self) -> None:
        """Average gradients that are not means yet; all workers find the same to be done."""
        self._tap.refuse_changed()
        if self._is_stale or self._trained.update():
            self._reopen()
        if any(map(self._is_fresh, range(len(self._given)))):
            self.pass_over()

    def _is_fresh(self, index: int) -> bool:
        """A gradient is this worker's own: not the mean, or written over it without a backward."""
        gradient = self._opened.exchanged.tensors[index].grad
        if gradient is None or not self._is_given(index):
            return gradient is not None
        return not self._has_passed and gradient._version != self._versions[index]

    def _is_given(self, index: int) -> bool:
        given = self._given[index]
        return given is not None and given() is self._opened.exchanged.tensors[index].grad

    # Around a step of the script's own optimizer.

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> StepArguments | None:
        if self._streaming is not None:
            return None
        changed = with_closure(self._averaged, arguments, named)
        if changed is not None:
            self._watch.refuse_servers("it gives the optimizer a closure")
            return changed
        with Remembered(self._context):
            self._look()
        return None

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        return with_mean_loss(closure, self._look, self._context)

    def _look(self) -> None:
        """All gradients of a step are there; what the watch has seen until here counts."""
        self._exchange_rest()
        if self._watches and self._watch.is_on:
            gradients = [tensor.grad for tensor in self._opened.exchanged.tensors]
            self._refuse_what_servers_lack()
            self._seen = self._watch.style(gradients, self._settings())
            self._watch.is_on = False

    def _refuse_what_servers_lack(self) -> None:
        optimizer, exchanged = self._trained.optimizers[0], self._opened.exchanged
        if not exchanged.optimizer:
            name = type(optimizer).__name__
            several = "several optimizers, or tensors without one"
            self._watch.refuse_servers(f"{name} cannot run on parts" if self._whole else several)
        if any(is_foreign(hook) for hook in _step_hooks(optimizer)):
            self._watch.refuse_servers("its optimizer has hooks")
        if self._returns >= PATIENCE:
            self._watch.refuse_servers("it changes weights outside the optimizer")
        if any(_is_viewed(tensor) for tensor in exchanged.tensors):
            self._watch.refuse_servers("it holds views of its weights")
        if self._context.gradient_use is None and any(map(is_known_elsewhere, exchanged.tensors)):
            self._watch.refuse_servers("its weights lie in an array or in shared memory")
        if any(_has_other_state(optimizer, tensor) for tensor in exchanged.tensors):
            self._watch.refuse_servers("its optimizer's state is of another type than its weights")

    def _foresee(self, *, clips: bool) -> None:
        """No step is needed to show what the loop does. It would be the one that takes most memory,
        with weights and means of this worker's own."""
        if self._trained.device.type == "cpu":  # a GPU's memory is not the servers' anyway
            self._refuse_what_servers_lack()
            self._decide(*self._watch.foresee(clips))

    def _after_step(self, *_: Any) -> None:
        self._has_passed = False
        if self._streaming is not None:
            return
        if self._seen is not None:
            self._decide(*self._seen)
            self._seen = None
        self._opened.greet(self._steps)

    def _decide(self, style: Style, why: str) -> None:
        """All workers take the style that suits the one which needs most."""
        key = f"style{self._decisions}"
        self._decisions += 1
        told = self._opened.gather(key, f"{int(style)} {why}")
        most = max(told, key=lambda text: int(text.partition(" ")[0]))
        style, why = Style(int(most[0])), most[2:]
        if style is not Style.WORKER:
            self._start_streaming(style, key)
        elif self._options.update == "server":
            problem = f"update = server, and this script needs its gradients: {why}."
            raise SpecError("architecture server", problem, "leave update out, or write worker.")
        else:
            self._watches = False
            self._tell_who_joins(why)
            self._context.note(f"servers average, workers update: of the script, {why}.")

    def _start_streaming(self, style: Style, key: str) -> None:
        opened, leader = self._opened, self._opened.leader
        opened.worker.serve_anew()
        assign_weights(opened)
        self._stream(style)
        if opened.leads:  # others may ask for the weights and the state it has sent
            opened.worker.confirm()
        opened.gather(f"{key}/assigned", "")
        if leader in opened.worker.lost:
            raise ExchangeError(
                f"worker{leader} was lost while it gave the servers weights and state."
            )
        self._tell_who_joins(str(int(style)))

    def _stream(self, style: Style) -> None:
        self._streaming = Streaming(
            self._opened,
            self._context,
            self._trained.optimizers[0],
            self,
            steps=self._steps,
            holds=style is Style.HOLD,
            way_out=WAY_OUT,
            before_write=self._take_back,
            before_forward=self._renewed,
        )

    def _renewed(self) -> bool:
        """The script trains something else from this step on: it has means to clip in it."""
        if not self._trained.may_be_other or not self._trained.update():
            return False
        self._take_back()
        self._reopen()
        return True

    def _take_back(self) -> None:
        """Weights and optimizer are the script's again; it is watched once more."""
        assert self._streaming is not None
        if self._joins:
            problem = "the script needs its weights or the optimizer's state, and joined later."
            raise SpecError("--join", problem, "start the job with all its workers.")
        self._tell_who_joins("it has them back")
        self._streaming.give_back()
        self._steps, self._streaming = self._streaming.steps, None
        self._returns += 1
        self._watch, self._seen = Watch(), None
        self._given = [None] * len(self._given)

    @property
    def _are_elsewhere(self) -> bool:
        """The script has replaced weights that servers hold, in a way that nobody is told of."""
        return self._streaming is not None and not self._streaming.weights.are_here

    def _settings(self) -> Any:
        return [settings_of(optimizer) for optimizer in self._trained.optimizers]

    # What the optimizer asks for while it is with the servers.

    def step(self) -> bool:
        assert self._streaming is not None
        if self._is_stale or (not self._streaming.has_begun and self._trained.update()):
            self._take_back()
            self._reopen()
            self._look()
            return False
        if self._are_elsewhere:
            self.follow()
            self._look()
            return False
        self._tap.refuse_changed()
        self._streaming.step()
        return True

    def saved_state(self) -> dict[str, Any]:
        assert self._streaming is not None
        return self._streaming.saved_state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._take_back()
        self._trained.optimizers[0].load_state_dict(state)

    def touch_state(self) -> None:
        self._take_back()


def _step_hooks(optimizer: Any) -> list[Any]:
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    common = sys.modules["torch.optim.optimizer"]
    everywhere = (common._global_optimizer_pre_hooks, common._global_optimizer_post_hooks)
    return [hook for hooks in (before, after, *everywhere) for hook in hooks.values()]


def _has_other_state(optimizer: Optimizer, tensor: Tensor) -> bool:
    """As after `model.double()`: state travels as numbers of its tensor's type."""
    state, size = optimizer.state.get(tensor, {}), tensor.numel()
    kept = [value for name, value in state.items() if is_elementwise_state(name, value, size)]
    return any(value.dtype != tensor.dtype for value in kept)


def _is_viewed(tensor: Tensor) -> bool:
    """Somebody else holds its memory, and would no longer see it change."""
    alone = 2  # the tensor, and the handle asked here
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > alone)
