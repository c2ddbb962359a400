"""Gradients averaged over a `Collective` as backward makes them: `ring` and `hybrid`.

Gradients lie end to end in buckets, the last layer's first, because that is the order in which they
come; a full bucket leaves at once. After a backward pass every `grad` holds the mean over the
workers, so that a script may do with it what it would do alone. What no backward pass brought
(gradients of `no_sync`, or set by hand) is averaged when the optimizer is about to step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.architectures.base import Context
from paceline.architectures.collective import Collective, place_like, start_equal
from paceline.architectures.gradients import (
    GradientTap,
    Remembered,
    StepArguments,
    with_closure,
    with_mean_loss,
)
from paceline.architectures.likeness import OTHER_WEIGHTS, are_other, stretch_of
from paceline.architectures.trained import Trained
from paceline.errors import ExchangeError, SpecError

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the exchange starts early."""

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
        self._tap = GradientTap(self, context, averages=True)
        self._buckets: list[_Bucket] = []
        self._started = self._turn = 0
        self._has_passed = False
        """Gradients were averaged since the last step: what is done to them now is to means."""

    def distribute(self, trained: Trained) -> None:
        self._trained = trained
        start_equal(self._collective, trained.everything())
        self._deal()
        for optimizer in trained.optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def take(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(self._before_step)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._tap.paused()

    def clip(self, max_norm: float) -> Tensor:
        self._exchange_rest()
        return torch.nn.utils.clip_grad_norm_(self._trained.tensors, max_norm)

    def settle(self) -> None:
        """Batch-norm statistics differ, as workers see different samples: worker 0's count."""
        start_equal(self._collective, list(self._trained.model.buffers()))

    def counters(self) -> dict[str, object]:
        return {}

    def close(self, *, failed: bool) -> None:
        self._tap.remove()
        self._collective.close()

    # Called by the tap, inside backward.

    def made(self, index: int) -> None:
        slot = self._slots[index]
        slot.fill()
        slot.bucket.num_missing -= 1
        # In the same order on every worker, whatever the order of their gradients.
        while self._started < len(self._buckets) and not self._buckets[self._started].num_missing:
            self._start_next()

    def pass_over(self) -> None:
        """Average the rest; after it every `grad` is the mean."""
        for bucket in self._buckets[self._started :]:
            for slot in bucket.slots:
                slot.fill()  # not reached by this backward pass: accumulated before, or unused
            self._start_next()
        self._collective.finish()
        whole = self._collective.weight == len(self._collective.members)
        for bucket in self._buckets:
            bucket.flat.div_(self._collective.weight)
            bucket.hand_out()
            if whole and bucket.has_other_weights():
                raise ExchangeError(OTHER_WEIGHTS)
        self._started, self._turn, self._has_passed = 0, self._turn + 1, True

    def _start_next(self) -> None:
        bucket = self._buckets[self._started]
        bucket.probe(self._turn)
        self._collective.start(bucket.flat)
        self._started += 1

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
        return with_mean_loss(closure, self._exchange_rest, self._context.mean)

    @torch.no_grad()
    def _exchange_rest(self) -> None:
        """Average gradients that are not means yet; all workers find the same to be done."""
        if self._trained.update():
            for slot in self._slots:  # their place goes with its bucket
                slot.tensor.grad = None if slot.tensor.grad is None else slot.tensor.grad.clone()
            self._deal()
        if any(slot.is_fresh or not (self._has_passed or slot.is_intact) for slot in self._slots):
            self.pass_over()

    def _deal(self) -> None:
        tensors = self._trained.tensors
        self._buckets = _deal(tensors, self._bucket_bytes, self._allocate)
        slots = {id(slot.tensor): slot for bucket in self._buckets for slot in bucket.slots}
        self._slots = [slots[id(tensor)] for tensor in tensors]
        self._tap.attach(tensors)


class _Bucket:
    """Gradients of one type, behind them a mark for each (how many workers have it), and at last a
    sample of the weights, which must be equal on all workers."""

    def __init__(self, tensors: list[Tensor], allocate: Allocate) -> None:
        first = tensors[0]
        num_elements = sum(t.numel() for t in tensors)
        self.flat = allocate(num_elements + len(tensors) + 1, first.dtype, first.device)
        self._marks, self._sample = self.flat[num_elements:-1], self.flat[-1]
        self._tensors, self._sampled, self._size = tensors, 0.0, 0.0
        self.slots, offset = [], 0
        for number, tensor in enumerate(tensors):
            place = place_like(self.flat[offset : offset + tensor.numel()], tensor)
            self.slots.append(_Slot(self, tensor, place, self._marks[number : number + 1]))
            offset += tensor.numel()
        self.num_missing = len(self.slots)

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
            slot.tensor.grad = slot.given = None if number in unused else slot.place
            slot.version = slot.place._version
        self.num_missing = len(self.slots)


class _Slot:
    """Where one tensor's gradient lies in its bucket."""

    def __init__(self, bucket: _Bucket, tensor: Tensor, place: Tensor, mark: Tensor) -> None:
        self.bucket, self.tensor, self.place, self.mark = bucket, tensor, place, mark
        self.given: Tensor | None = None
        """The mean that was handed out last; any other gradient is this worker's own."""
        self.version = 0

    @property
    def is_fresh(self) -> bool:
        gradient = self.tensor.grad
        return gradient is not None and gradient is not self.given

    @property
    def is_intact(self) -> bool:
        """Nobody has written to the mean since it was handed out."""
        return self.tensor.grad is None or self.place._version == self.version

    def fill(self) -> None:
        gradient = self.tensor.grad
        self.mark.fill_(0 if gradient is None else 1)
        if gradient is None:
            self.place.zero_()
        elif gradient.layout != torch.strided:
            problem = "a gradient is sparse, and this architecture exchanges dense ones."
            raise SpecError("distribute", problem, "build the embedding with sparse=False.")
        elif gradient.data_ptr() != self.place.data_ptr():
            self.place.copy_(gradient)


def _deal(tensors: list[Tensor], bucket_bytes: int, allocate: Allocate) -> list[_Bucket]:
    """Fill buckets of about `bucket_bytes`, one type each, from the last tensor to the first."""
    buckets: list[_Bucket] = []
    filling: list[Tensor] = []
    size_bytes = 0
    for tensor in reversed(tensors):
        own_bytes = tensor.numel() * tensor.element_size()
        limit_bytes = bucket_bytes if buckets else min(bucket_bytes, FIRST_BUCKET_BYTES)
        full = size_bytes + own_bytes > limit_bytes or (
            filling and (filling[0].dtype, filling[0].device) != (tensor.dtype, tensor.device)
        )
        if filling and full:
            buckets.append(_Bucket(filling, allocate))
            filling, size_bytes = [], 0
        filling.append(tensor)
        size_bytes += own_bytes
    return [*buckets, _Bucket(filling, allocate)]


def _in_own_memory(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(num_elements, dtype=dtype, device=device)
