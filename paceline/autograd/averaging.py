"""Average gradients over a `Collective` as backward makes them: `ring`, `hybrid` and `server`.

Gradients lie end to end in buckets (`buckets.py`); a full bucket leaves at once. After a backward
pass every `grad` holds the mean over the workers, so that a script may do with it what it would do
alone. Gradients that no backward pass brought (those of `no_sync`, or set by hand) are averaged
when the optimizer is about to step.

Where the others go on without a worker that is lost, buckets lie in two blocks of memory in turn:
gradients of this step are summed in one while the other still has the means of the last, for one
who lacks them. A sum that was interrupted is made again from the gradients that autograd left.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.autograd.buckets import Allocate, Bucket, GradientSlot, deal, in_own_memory
from paceline.autograd.divergence import OTHER_WEIGHTS, refuse_other
from paceline.autograd.gradients import (
    GradientTap,
    Remembered,
    StepArguments,
    uncompiled,
    with_closure,
    with_mean_loss,
)
from paceline.autograd.last_means import LastMeans
from paceline.autograd.trained import Trained, refuse_max_norm
from paceline.collectives.collective import Collective, start_equal
from paceline.collectives.context import Context, StepAgain
from paceline.collectives.view_collective import ExchangeVoid, ViewCollective
from paceline.errors import ExchangeError, SpecError
from paceline.protocol.actions import AllReduce, Event, Usable
from paceline.protocol.collectives import Finish, Made, Reduced, RingMachine


class BucketedArchitecture:
    """One worker's side of any architecture that averages whole gradients in each step."""

    def __init__(
        self,
        collective: Collective,
        context: Context,
        *,
        bucket_bytes: int,
        allocate: Allocate | None = None,
    ) -> None:
        self._collective, self._context = collective, context
        self._bucket_bytes, self._allocate = bucket_bytes, allocate or in_own_memory
        self._may_begin_again = isinstance(collective, ViewCollective)
        """From the gradients that autograd left."""
        self._tap = GradientTap(self, context, averages=True)
        self._buckets: list[Bucket] = []
        self._machine = RingMachine((), 0)
        self._has_begun = False
        """Gradients of the pass that is under way have been filled in."""
        self._last_means = LastMeans()
        self._has_passed = False
        """Gradients were averaged since the last step: what is done to them now is to means."""

    def distribute(self, trained: Trained) -> None:
        refuse_max_norm(trained.model, self._context.identity.workers)
        self._trained = trained
        start_equal(self._collective, trained.everything())
        self._deal()
        self._tap.attach(trained.tensors)
        for optimizer in trained.optimizers:
            optimizer.register_step_pre_hook(uncompiled(self._before_step))

    def take(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(uncompiled(self._before_step))

    @property
    def passes(self) -> int:
        """See `CountsPasses`."""
        return self._machine.step

    @passes.setter
    def passes(self, number: int) -> None:
        self._machine = RingMachine(self._collective.members, len(self._buckets), step=number)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._tap.paused()

    def clip(self, max_norm: float) -> Tensor:
        self._exchange_rest()
        tensors = self._trained.tensors
        if self._last_means.take_clipped():
            return torch.nn.utils.get_total_norm([t.grad for t in tensors if t.grad is not None])
        with self._last_means.being_clipped(self._slots):
            return torch.nn.utils.clip_grad_norm_(tensors, max_norm)

    def settle(self) -> None:
        """Batch-norm statistics differ, as workers see different samples: worker 0's count."""
        with Remembered(self._context):
            refuse_other(self._trained.tensors, self._context)
        start_equal(self._collective, list(self._trained.model.buffers()))

    def counters(self) -> dict[str, object]:
        return {}

    def close(self, *, failed: bool) -> None:
        self._tap.remove()
        self._collective.close()

    def follow(self) -> None:
        self._tap.refuse_changed()
        is_other = self._trained.may_be_other or not self._tap.is_attached
        if is_other and not self._is_other():
            self._tap.attach(self._trained.tensors)

    # Called by the tap, inside backward.

    def made(self, index: int) -> None:
        if not self._has_begun:
            self._begin()
        slot = self._slots[index]
        slot.fill()
        if not self._may_begin_again:
            slot.move_in()
        bucket = slot.bucket
        bucket.num_missing -= 1
        if not bucket.num_missing:
            self._tell(Made(bucket.number))

    def pass_over(self) -> None:
        """Average the rest; after it every `grad` is the mean."""
        while not self._is_summed():
            if self._context.training.repeats_steps:
                raise StepAgain
        for bucket in self._buckets:
            self._tell(Reduced(bucket.number))
        self._has_passed, self._has_begun = True, False
        if isinstance(self._collective, ViewCollective):
            self._last_means.lie_in(self._buckets)
            self._collective.keep(lambda: self._last_means.intact(self._slots))
            for bucket in self._buckets:
                bucket.turn_over()

    def pass_broken(self, error: Exception) -> None:
        """Some buckets may have left, and another worker may have got further: sum as ever."""
        self.pass_over()

    def _begin(self) -> None:
        """Before the first gradient of a pass is filled in: a script may hold on to means of the
        last, and they must stay what they are."""
        if self._has_begun:
            return
        if any(slot.is_outgrown() for slot in self._slots):
            self._deal_anew()
        self._has_begun = True
        for bucket in self._buckets:
            if bucket.is_held_on_to():
                self._part_with(bucket)
            bucket.mark_all()

    def _part_with(self, bucket: Bucket) -> None:
        """Leave its memory to the script."""
        bucket.renew()

    def _move_means(self, bucket: Bucket) -> None:
        """Its memory is known to others: means that the script holds get memory of their own."""
        for slot in bucket.slots:
            mean = slot.given
            if mean is not None and not slot.has_mean:
                mean.data = mean.clone()
        if bucket.is_held_on_to():
            problem = "the script holds on to views of gradients of an earlier step."
            raise SpecError("gradients", problem, "keep copies: parameter.grad.clone().")

    def _is_summed(self) -> bool:
        """Sum what is left; False where workers were lost meanwhile: nothing is summed then."""
        self._begin()
        for bucket in self._buckets[self._machine.started :]:
            for slot in bucket.slots:
                slot.fill()  # not reached by this backward pass: accumulated before, or unused
        self._tell(Finish())
        if not isinstance(self._collective, ViewCollective):
            self._collective.finish()
            return True
        try:
            self._collective.finish(keeps=[self._last_means.expect()])
        except ExchangeVoid:
            self._deal()  # what was started may still write to these buckets
            return False
        self._last_means.arrive()
        return True

    def _tell(self, event: Event) -> None:
        """Do what the machine decides."""
        for action in self._machine.handle(event):
            match action:
                case AllReduce():
                    bucket = self._buckets[action.bucket]
                    bucket.probe(self._machine.step)
                    self._collective.start(bucket.flat)
                case Usable():
                    self._hand_out(self._buckets[action.chunk])

    def _hand_out(self, bucket: Bucket) -> None:
        weight = self._collective.weight
        if weight != 1.0:
            bucket.flat.div_(weight)
        bucket.hand_out()
        if self._collective.counts_equally and bucket.has_other_weights():
            raise ExchangeError(OTHER_WEIGHTS)

    # Around a step.

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> StepArguments | None:
        def averaged(closure: Callable[[], Any]) -> Callable[[], Any]:
            return with_mean_loss(closure, self._exchange_rest, self._context)

        changed = with_closure(averaged, arguments, named)
        if changed is None:
            with Remembered(self._context):
                self._exchange_rest()
            self._has_passed = False
        return changed

    @torch.no_grad()
    def _exchange_rest(self) -> None:
        """Average gradients that are not means yet; all workers find the same to be done."""
        self._tap.refuse_changed()
        self._is_other()
        is_to_be_averaged = GradientSlot.is_fresh if self._has_passed else GradientSlot.is_own
        if any(map(is_to_be_averaged, self._slots)):
            self.pass_over()

    def _is_other(self) -> bool:
        """The script trains something else now: it is dealt to buckets anew."""
        if not self._trained.update():
            return False
        self._deal_anew()
        self._tap.attach(self._trained.tensors)
        return True

    def _deal_anew(self) -> None:
        for slot in self._slots:  # their place goes with its bucket
            if slot.lies_here:
                slot.tensor.grad = slot.place.clone()
        self._deal()

    def _deal(self) -> None:
        tensors, blocks = self._trained.tensors, 1 if self._context.views is None else 2
        self._buckets = deal(tensors, self._bucket_bytes, self._allocate, blocks)
        slots = {id(slot.tensor): slot for bucket in self._buckets for slot in bucket.slots}
        self._slots = [slots[id(tensor)] for tensor in tensors]
        members, step = self._collective.members, self._machine.step
        self._machine = RingMachine(members, len(self._buckets), step=step)
        self._has_begun = False
