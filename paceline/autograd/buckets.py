"""Gradients averaged over a `Collective` as backward makes them: `ring` and `hybrid`.

Gradients lie end to end in buckets, the last layer's first, because that is the order in which they
come; a full bucket leaves at once. After a backward pass every `grad` holds the mean over the
workers, so that a script may do with it what it would do alone. What no backward pass brought
(gradients of `no_sync`, or set by hand) is averaged when the optimizer is about to step.

Where the others go on without a worker that is lost, buckets lie in two blocks of memory in turn:
gradients of this step are summed in one while the other still has the means of the last, for one
who lacks them. A sum that was interrupted is made again from the gradients that autograd left.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.autograd.divergence import OTHER_WEIGHTS, are_other, refuse_other, stretch_of
from paceline.autograd.gradients import (
    GradientTap,
    Remembered,
    StepArguments,
    is_held,
    uncompiled,
    with_closure,
    with_mean_loss,
)
from paceline.autograd.trained import Trained, refuse_max_norm
from paceline.collectives.collective import Collective, place_like, start_equal
from paceline.collectives.context import Context, StepAgain
from paceline.collectives.view_collective import ExchangeVoid, ViewCollective
from paceline.errors import ExchangeError, SpecError
from paceline.protocol.actions import AllReduce, Event, Usable
from paceline.protocol.buckets import FIRST_BUCKET_BYTES, filled
from paceline.protocol.collectives import Finish, Made, Reduced, RingMachine

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""(number of elements, type, device) -> a flat tensor for one bucket."""


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
        self._bucket_bytes, self._allocate = bucket_bytes, allocate or _in_own_memory
        self._may_begin_again = isinstance(collective, ViewCollective)
        """From the gradients that autograd left."""
        self._tap = GradientTap(self, context, averages=True)
        self._buckets: list[Bucket] = []
        self._machine = RingMachine((), 0)
        self._has_begun = False
        """Gradients of the pass that is under way have been filled in."""
        self._means: list[tuple[Tensor, int]] = []
        """Where others may lack them: the last pass's means, and their versions then."""
        self._is_clipped, self._came_clipped = torch.zeros(1), False
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
        if self._came_clipped:
            self._came_clipped = False
            return torch.nn.utils.get_total_norm(
                [t.grad for t in self._trained.tensors if t.grad is not None]
            )
        were_kept = bool(self._means) and self._kept() is not None
        norm = torch.nn.utils.clip_grad_norm_(self._trained.tensors, max_norm)
        if were_kept:
            self._is_clipped.fill_(1)
            self._means = [(flat, flat._version) for flat, _ in self._means]
        return norm

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
            self._keep(self._collective)

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

    def _part_with(self, bucket: "Bucket") -> None:
        """Leave its memory to the script."""
        bucket.renew(self._allocate)

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
        is_clipped = torch.zeros(1)
        try:
            self._collective.finish(keeps=[is_clipped])
        except ExchangeVoid:
            self._deal()  # what was started may still write to these buckets
            return False
        self._is_clipped, self._came_clipped = is_clipped, bool(is_clipped)
        return True

    def _keep(self, collective: ViewCollective) -> None:
        """Leave the means where they are, and lie elsewhere in the next pass."""
        self._means = [(bucket.flat, bucket.flat._version) for bucket in self._buckets]
        collective.keep(self._kept)
        for bucket in self._buckets:
            bucket.turn_over()

    def _kept(self) -> list[Tensor] | None:
        """The last pass's means, and whether they are clipped; None where the script has changed
        them since, in a way that we do not know."""
        intact = all(flat._version == version for flat, version in self._means)
        intact = intact and not any(slot.is_held for slot in self._slots)
        return [*(flat for flat, _ in self._means), self._is_clipped] if intact else None

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

    def _hand_out(self, bucket: "Bucket") -> None:
        weight = self._collective.weight
        bucket.flat.div_(weight)
        bucket.hand_out()
        if weight == len(self._collective.members) and bucket.has_other_weights():
            raise ExchangeError(OTHER_WEIGHTS)

    # Around a step.

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> StepArguments | None:
        changed = with_closure(self._averaged, arguments, named)
        if changed is None:
            with Remembered(self._context):
                self._exchange_rest()
            self._has_passed = False
        return changed

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        return with_mean_loss(closure, self._exchange_rest, self._context)

    @torch.no_grad()
    def _exchange_rest(self) -> None:
        """Average gradients that are not means yet; all workers find the same to be done."""
        self._tap.refuse_changed()
        self._is_other()
        is_to_be_averaged = _Slot.is_fresh if self._has_passed else _Slot.is_own
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
        self._buckets = _deal(tensors, self._bucket_bytes, self._allocate, blocks)
        slots = {id(slot.tensor): slot for bucket in self._buckets for slot in bucket.slots}
        self._slots = [slots[id(tensor)] for tensor in tensors]
        members, step = self._collective.members, self._machine.step
        self._machine = RingMachine(members, len(self._buckets), step=step)
        self._has_begun = False


class Bucket:
    """Gradients of one type, behind them a mark for each (how many workers have it), and at last a
    sample of the weights, which must be equal on all workers."""

    def __init__(
        self, number: int, tensors: list[Tensor], allocate: Allocate, blocks: int = 1
    ) -> None:
        """It lies in each of so many blocks in turn."""
        self.number = number
        first = tensors[0]
        num_elements = sum(t.numel() for t in tensors) + len(tensors) + 1
        self._blocks = [
            _Block(allocate(num_elements, first.dtype, first.device), tensors)
            for _ in range(blocks)
        ]
        self._tensors, self._sampled, self._size = tensors, 0.0, 0.0
        self.slots = [_Slot(self, tensor) for tensor in tensors]
        self.num_missing = len(self.slots)
        self.turn_over()

    def turn_over(self) -> None:
        """Lie in the next block."""
        self._lie_in(self._blocks.pop(0))

    def renew(self, allocate: Allocate) -> None:
        """Lie in new memory in place of the present block's."""
        flat = self._blocks.pop().flat
        self._lie_in(_Block(allocate(flat.numel(), flat.dtype, flat.device), self._tensors))

    def is_held_on_to(self) -> bool:
        """Somebody has means that were handed out, or views of them, beside the tensors' `grad`."""
        num_handed_out = self._blocks[-1].num_handed_out
        return num_handed_out > 0 and num_handed_out > sum(slot.has_mean for slot in self.slots)

    def _lie_in(self, block: "_Block") -> None:
        self._blocks.append(block)
        self.flat, self._marks, self._sample = block.flat, block.marks, block.sample
        for slot, place, mark in zip(self.slots, block.places, block.each_mark, strict=True):
            slot.place, slot.mark = place, mark

    def mark_all(self) -> None:
        """Every gradient is there, until one is found missing: one pass over the marks, not one for
        each."""
        self._marks.fill_(1)

    @torch.no_grad()
    def probe(self, turn: int) -> None:
        """Let a stretch of the weights travel as its mean: another one in each turn."""
        stretch = stretch_of(self._tensors, turn)
        if stretch is None:
            return
        self._sample.copy_(stretch.mean())
        self._sampled = float(self._sample)
        self._size = float(stretch.abs().mean())

    def has_other_weights(self) -> bool:
        """After a sum: the other workers' sample is not this one's."""
        if self.flat.device.type != "cpu":
            return False
        return are_other(float(self._sample), self._sampled, self._size, self.flat.dtype)

    def hand_out(self) -> None:
        """Give each tensor its averaged gradient; None stays None where no worker has one."""
        lacking = [number for number, slot in enumerate(self.slots) if slot.tensor.grad is None]
        marks = self._marks.tolist() if lacking else []  # on a GPU a look at them waits for it
        unused = {number for number in lacking if not marks[number]}
        for number, slot in enumerate(self.slots):
            slot.hand_out(None if number in unused else slot.place.detach())
        self.num_missing = len(self.slots)


class _Block:
    """Memory that a bucket lies in."""

    def __init__(self, flat: Tensor, tensors: list[Tensor]) -> None:
        self.flat, self.sample = flat, flat[-1]
        self.places, offset = [], 0
        for tensor in tensors:
            self.places.append(place_like(flat[offset : offset + tensor.numel()], tensor))
            offset += tensor.numel()
        self.marks = flat[offset:-1]
        self.each_mark = [self.marks[number : number + 1] for number in range(len(tensors))]
        self._num_own = 0
        self._num_own = self.num_handed_out

    @property
    def num_handed_out(self) -> int:
        """How many tensors lie here that are not its own."""
        count: int = torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)
        return count - self._num_own


class _Slot:
    """Where one tensor's gradient lies in its bucket."""

    place: Tensor
    mark: Tensor

    def __init__(self, bucket: Bucket, tensor: Tensor) -> None:
        self.bucket, self.tensor = bucket, tensor
        self._given: weakref.ref[Tensor] | None = None
        """The mean that was handed out last; any other gradient is this worker's own."""
        self._version = 0
        self.is_held = False
        """The script knows where its gradient lies: the mean goes there."""

    @property
    def given(self) -> Tensor | None:
        return None if self._given is None else self._given()

    @property
    def has_mean(self) -> bool:
        return self.lies_here and self.tensor.grad is self.given

    @property
    def lies_here(self) -> bool:
        """The gradient is where it is exchanged."""
        gradient = self.tensor.grad
        if gradient is None or gradient.layout != torch.strided:
            return False
        return gradient.data_ptr() == self.place.data_ptr()

    def is_outgrown(self) -> bool:
        """The tensor has become one of another type or shape (`model.double()`)."""
        tensor, place = self.tensor, self.place
        return tensor.dtype != place.dtype or tensor.shape != place.shape

    def is_fresh(self) -> bool:
        """This worker's own gradient has not been averaged."""
        gradient, given = self.tensor.grad, self._given
        return gradient is not None and (given is None or given() is not gradient)

    def is_own(self) -> bool:
        """It is not a mean as it was handed out: fresh, or written to since."""
        gradient = self.tensor.grad
        return gradient is not None and (self.is_fresh() or gradient._version != self._version)

    def hand_out(self, mean: Tensor | None) -> None:
        """A new tensor each time, so that it can be known whether the last is still in use."""
        if self.is_held and mean is not None:
            held = self.tensor.grad
            assert held is not None
            mean = held if self.lies_here else held.copy_(mean)
        self.tensor.grad = mean
        self._given = None if mean is None else weakref.ref(mean)
        self._version = 0 if mean is None else mean._version

    def fill(self) -> None:
        self.is_held = self.tensor.grad is not None and is_held(
            self.tensor, in_own_memory=self.lies_here
        )
        gradient = self.tensor.grad
        if gradient is None:
            self.mark.zero_()
            self.place.zero_()
        elif gradient.layout != torch.strided:
            problem = "a gradient is sparse, and this architecture exchanges dense ones."
            raise SpecError("distribute", problem, "build the embedding with sparse=False.")
        elif not self.lies_here:
            self.place.copy_(gradient)

    def move_in(self) -> None:
        """Have `grad` lie in the bucket from here on: what autograd made is free for the next."""
        if self.is_held:
            return
        self.tensor.grad, self._given = self.place.detach(), None


def _deal(
    tensors: list[Tensor], bucket_bytes: int, allocate: Allocate, blocks: int = 1
) -> list[Bucket]:
    """Fill buckets of about `bucket_bytes`, one type each, from the last tensor to the first."""
    made = tensors[::-1]
    sizes = [(t.numel() * t.element_size(), (t.dtype, t.device)) for t in made]
    cut = filled(sizes, min(bucket_bytes, FIRST_BUCKET_BYTES), bucket_bytes)
    return [
        Bucket(number, [made[index] for index in bucket], allocate, blocks)
        for number, bucket in enumerate(cut)
    ]


def _in_own_memory(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(num_elements, dtype=dtype, device=device)
