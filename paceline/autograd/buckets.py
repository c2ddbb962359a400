"""Buckets of gradients: flat memory in which gradients are exchanged, and where each lies in it.

Gradients lie end to end, the last layer's first, because that is the order in which backward makes
them. A slot knows whether the script's `grad` is a mean that was handed out, or this worker's own.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.autograd.divergence import are_other, stretch_of
from paceline.autograd.gradients import is_held
from paceline.collectives.collective import place_like
from paceline.errors import SpecError
from paceline.protocol.buckets import FIRST_BUCKET_BYTES, filled


class BucketSize(NamedTuple):
    """Size of one bucket in memory."""

    elements: int
    marks: int
    """The last elements, which are no gradients: they must arrive exactly."""

    dtype: torch.dtype
    device: torch.device


Allocate = Callable[[Sequence[BucketSize]], list[Tensor]]
"""Make flat memory for all buckets. Memory from an earlier call is not used again."""


def in_own_memory(sizes: Sequence[BucketSize]) -> list[Tensor]:
    return [torch.zeros(size.elements, dtype=size.dtype, device=size.device) for size in sizes]


class Bucket:
    """Gradients of one type, after them a mark for each (the number of workers that have it), and
    last a sample of the weights, which must be equal on all workers."""

    def __init__(self, number: int, tensors: list[Tensor], flats: Sequence[Tensor]) -> None:
        """`flats`: the bucket lies in each of them in turn."""
        self.number = number
        self._blocks = [_Block(flat, tensors) for flat in flats]
        self._tensors, self._sampled, self._size = tensors, 0.0, 0.0
        self.slots = [GradientSlot(self, tensor) for tensor in tensors]
        self.num_missing = len(self.slots)
        self.turn_over()

    def turn_over(self) -> None:
        """Lie in the next block."""
        self._lie_in(self._blocks.pop(0))

    def renew(self) -> None:
        """Lie in new memory in place of the present block's."""
        self._lie_in(_Block(torch.zeros_like(self._blocks.pop().flat), self._tensors))

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


class GradientSlot:
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


def deal(
    tensors: list[Tensor], bucket_bytes: int, allocate: Allocate, blocks: int = 1
) -> list[Bucket]:
    """Fill buckets of about `bucket_bytes`, one type each, from the last tensor to the first. Each
    bucket lies in `blocks` pieces of memory in turn."""
    made = tensors[::-1]
    sizes = [(t.numel() * t.element_size(), (t.dtype, t.device)) for t in made]
    cut = filled(sizes, min(bucket_bytes, FIRST_BUCKET_BYTES), bucket_bytes)
    groups = [[made[index] for index in bucket] for bucket in cut]
    flats = iter(allocate([_size(group) for group in groups for _ in range(blocks)]))
    return [
        Bucket(number, group, [next(flats) for _ in range(blocks)])
        for number, group in enumerate(groups)
    ]


def _size(tensors: Sequence[Tensor]) -> BucketSize:
    first, marks = tensors[0], len(tensors) + 1
    elements = sum(tensor.numel() for tensor in tensors) + marks
    return BucketSize(elements, marks, first.dtype, first.device)
